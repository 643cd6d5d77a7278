//! What each file of the CNI directory is to be. Pure: the same files, settings and record give the same plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use inpod_cni_config::{
    Conflist, Directory, Entry, INPOD_CNI, ISTIO_CNI, Loaded, NetworkFile, json_eq,
};

use crate::{
    config::Config,
    entry, files,
    mode::Mode,
    record::{ChangedFile, Record},
    removal::{self, Restore},
};

/// What a file is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileState {
    /// There, with this content.
    Content(Vec<u8>),
    /// Not there.
    Absent,
}

/// What the files are to be. A file that is not named is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By name.
    pub files: BTreeMap<String, FileState>,
    /// Files that are as their owners want them afterwards: nothing of them needs to be remembered.
    pub forget: BTreeSet<String>,
}

/// Why there is no plan, or why it did not get inpod into the chain. Nothing is changed meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Nothing to get into. What is there of ours stays, so that no pod slips past.
    #[error(
        "there is no valid network configuration yet that inpod could join: waiting for the primary CNI"
    )]
    NoPrimary,
    /// The one that is asked for is not there.
    #[error("{0} is not there or not valid: waiting for it; setting primary_file names it")]
    NoSuchPrimary(String),
    /// Runtimes would take the other file.
    #[error(
        "owned_file {owned} does not sort before {other}, which runtimes would take: set owned_file to a name that does"
    )]
    SortsBehind {
        /// The file of our own.
        owned: String,
        /// The file that goes first.
        other: String,
    },
    /// Another file decides.
    #[error("runtimes take {0}, which inpod is not in")]
    NotEffective(String),
}

/// What is aimed at.
#[derive(Clone, Debug)]
pub struct DesiredChain {
    mode: Mode,
    owned_file: String,
    standalone_file: String,
    primary_file: Option<String>,
    entry: Entry,
    standalone: Vec<u8>,
}

impl DesiredChain {
    /// What the settings ask for.
    pub fn new(config: &Config) -> Self {
        let entry = entry::entry(config);
        Self {
            mode: config.mode,
            owned_file: config.owned_file.clone(),
            standalone_file: config.standalone_file.clone(),
            primary_file: config.primary_file.clone(),
            standalone: entry::standalone(config, &entry),
            entry,
        }
    }

    /// Whether a file is ours altogether.
    pub fn is_own(&self, name: &str) -> bool {
        name == self.owned_file || name == self.standalone_file
    }

    /// Takes away what Cilium has made of our own files: a later Cilium would put it back.
    pub(crate) fn remove_backups(&self, dir: &Path) -> io::Result<()> {
        for name in [&self.owned_file, &self.standalone_file] {
            files::remove(&dir.join(format!("{name}.cilium_bak")))?;
        }
        Ok(())
    }

    /// What the files are to be.
    ///
    /// # Errors
    ///
    /// When there is nothing to get into, or the settings forbid it.
    pub fn plan(&self, directory: &Directory, record: &Record) -> Result<Plan, PlanError> {
        let planner = Planner {
            desired: self,
            directory,
            record,
        };
        let mut files = match self.mode {
            Mode::Owned => planner.owned()?,
            Mode::InPlace => planner.in_place()?,
            Mode::Standalone => planner.standalone(),
        };
        for name in planner.istio_files() {
            files.insert(name, FileState::Absent);
        }
        Ok(planner.with_reverts(files))
    }

    /// Whether inpod is in the file that a runtime takes.
    ///
    /// # Errors
    ///
    /// When it is in none, or another.
    pub fn check_effective(&self, directory: &Directory) -> Result<(), PlanError> {
        if self.mode == Mode::Standalone {
            let file = directory.file(&self.standalone_file);
            let is_there = file.is_some_and(|file| file.content == self.standalone);
            let missing = || PlanError::NoSuchPrimary(self.standalone_file.clone());
            return is_there.then_some(()).ok_or_else(missing);
        }
        let (file, list) = directory.first().ok_or(PlanError::NoPrimary)?;
        let ours = list.plugin(INPOD_CNI);
        if ours.is_some_and(|plugin| json_eq(plugin.text, &self.entry.text)) {
            return Ok(());
        }
        Err(PlanError::NotEffective(file.name.clone()))
    }
}

/// What is looked at for one plan.
struct Planner<'a> {
    desired: &'a DesiredChain,
    directory: &'a Directory,
    record: &'a Record,
}

impl<'a> Planner<'a> {
    fn owned(&self) -> Result<BTreeMap<String, FileState>, PlanError> {
        let (_, list) = self.primary()?;
        let owned = &self.desired.owned_file;
        if let Some(first) = self
            .candidates()
            .next()
            .filter(|first| first.name <= *owned)
        {
            return Err(PlanError::SortsBehind {
                owned: owned.clone(),
                other: first.name.clone(),
            });
        }
        let content = list.replaced(ISTIO_CNI, &self.desired.entry);
        Ok([(owned.clone(), FileState::Content(content))].into())
    }

    fn in_place(&self) -> Result<BTreeMap<String, FileState>, PlanError> {
        let (file, list) = self.primary()?;
        let content = FileState::Content(list.replaced(ISTIO_CNI, &self.desired.entry));
        let mut files = BTreeMap::new();
        let stem = stem(&file.name);
        for single in [format!("{stem}.conf"), format!("{stem}.json")] {
            // One that a list stands for stays away.
            if file.name == single || self.is_removed(&single) {
                files.insert(single, FileState::Absent);
            }
        }
        files.insert(format!("{stem}.conflist"), content);
        Ok(files)
    }

    fn standalone(&self) -> BTreeMap<String, FileState> {
        let content = FileState::Content(self.desired.standalone.clone());
        [(self.desired.standalone_file.clone(), content)].into()
    }

    /// The files that are the incumbent's altogether: there now, or taken away before.
    fn istio_files(&self) -> Vec<String> {
        let there = self
            .directory
            .files
            .iter()
            .filter(|file| is_istio_file(file));
        let mut names: Vec<_> = there.map(|file| file.name.clone()).collect();
        let taken = self.record.files.iter().filter(|(name, changed)| {
            let before = changed.before.as_ref().filter(|_| changed.ours.is_none());
            let file =
                before.map(|before| NetworkFile::new((*name).clone(), before.bytes().to_owned()));
            file.is_some_and(|file| is_istio_file(&file))
        });
        names.extend(taken.map(|(name, _)| name.clone()));
        names
    }

    /// The primary's file and its list.
    fn primary(&self) -> Result<(&'a NetworkFile, &'a Conflist), PlanError> {
        let found = match &self.desired.primary_file {
            Some(name) => {
                let is_it = |file: &&NetworkFile| file.name == *name;
                // What became of it, or what its owner made of it.
                let is_sibling = |file: &&NetworkFile| stem(&file.name) == stem(name);
                let found = self.candidates().find(is_it);
                let found = found.or_else(|| self.candidates().find(is_sibling));
                Some(found.ok_or_else(|| PlanError::NoSuchPrimary(name.clone()))?)
            }
            None => self.candidates().next(),
        };
        let found = found.map(|file| self.rewritten_single(file).unwrap_or(file));
        let list = |file: &'a NetworkFile| Some((file, file.list()?));
        found.and_then(list).ok_or(PlanError::NoPrimary)
    }

    /// The single configuration that a list stands for, when its owner has written it anew.
    fn rewritten_single(&self, list: &NetworkFile) -> Option<&'a NetworkFile> {
        self.candidates().find(|file| {
            matches!(file.loaded, Ok(Loaded::Single(..)))
                && stem(&file.name) == stem(&list.name)
                && self.is_removed(&file.name)
        })
    }

    fn is_removed(&self, name: &str) -> bool {
        let changed = self.record.files.get(name);
        changed.is_some_and(|changed| changed.ours.is_none() && changed.before.is_some())
    }

    /// The valid files that are neither ours nor the incumbent's, in the order of runtimes.
    fn candidates(&self) -> impl Iterator<Item = &'a NetworkFile> {
        self.directory.files.iter().filter(|file| {
            let is_own = self
                .record
                .files
                .get(&file.name)
                .is_some_and(|changed| changed.own);
            file.list().is_some()
                && !is_own
                && !self.desired.is_own(&file.name)
                && !is_istio_file(file)
        })
    }

    /// The plan that also takes back what an earlier one has made of files that this one does not name.
    fn with_reverts(&self, mut files: BTreeMap<String, FileState>) -> Plan {
        let mut forget = BTreeSet::new();
        for (name, changed) in &self.record.files {
            if files.contains_key(name) {
                continue;
            }
            let file = self.directory.file(name);
            if let Some(state) = removal::revert(changed, file, Restore::Everything) {
                files.insert(name.clone(), state);
            }
            forget.insert(name.clone());
        }
        Plan { files, forget }
    }
}

impl Plan {
    /// What is to be remembered of the files that this plan changes or keeps.
    pub fn updated_record(
        &self,
        desired: &DesiredChain,
        directory: &Directory,
        record: &Record,
    ) -> Record {
        let mut updated_record = record.clone();
        for (name, state) in &self.files {
            let known = record.files.get(name);
            if self.forget.contains(name) {
                continue;
            }
            let changed = changed_file(desired.is_own(name), known, directory.file(name), state);
            updated_record.files.insert(name.clone(), changed);
        }
        updated_record
    }
}

fn changed_file(
    own: bool,
    known: Option<&ChangedFile>,
    file: Option<&NetworkFile>,
    state: &FileState,
) -> ChangedFile {
    let ours = known.and_then(|known| known.ours.as_ref());
    let is_as_made = match (known, file) {
        (Some(_), Some(file)) => ours.is_some_and(|ours| ours.bytes() == file.content),
        (Some(_), None) => true,
        (None, _) => false,
    };
    let before = match (known, file) {
        _ if own => None,
        (Some(known), _) if is_as_made => known.before.clone(),
        (_, Some(file)) => Some(removal::without_inpod(file).as_slice().into()),
        (_, None) => None,
    };
    let istio_entry = file
        .and_then(NetworkFile::list)
        .and_then(|list| list.plugin(ISTIO_CNI));
    ChangedFile {
        before,
        // Read from the file when the record is written.
        mode: known.and_then(|known| known.mode),
        own,
        ours: match state {
            FileState::Content(content) => Some(content.as_slice().into()),
            FileState::Absent => None,
        },
        istio_entry: istio_entry
            .map(|plugin| plugin.text.into())
            .or_else(|| known?.istio_entry.clone()),
    }
}

/// Whether a file is the incumbent's altogether: its own copy of a chain, or its plugin alone.
pub(crate) fn is_istio_file(file: &NetworkFile) -> bool {
    file.list().is_some_and(|list| {
        let is_alone = list.plugins().all(|plugin| plugin.kind == ISTIO_CNI);
        is_alone || (file.name.contains(ISTIO_CNI) && list.plugin(ISTIO_CNI).is_some())
    })
}

fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
