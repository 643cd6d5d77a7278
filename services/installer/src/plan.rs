//! Computes the desired CNI files from the present files, the settings and the record, without I/O.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use crate::{Conflist, Directory, Entry, INPOD_CNI, ISTIO_CNI, Loaded, NetworkFile, json_eq};

use crate::{
    config::Config,
    entry,
    mode::Mode,
    record::{ChangedFile, Record},
    removal::{self, Restore},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileState {
    Content(Vec<u8>),
    Absent,
}

/// The desired state of files; all other files are left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub files: BTreeMap<String, FileState>,
    /// Files that belong to their owners again after the plan, and leave the record.
    pub forget: BTreeSet<String>,
}

/// The reason why there is no plan, or why the plan had no effect. The installer changes nothing in the meantime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// There is no network to join. Existing files of inpod stay, so that no pod starts unenrolled.
    #[error("no valid network configuration to join: waiting for the primary CNI")]
    NoPrimary,
    /// The setting `primary_file` names a missing or invalid file.
    #[error("{0}, which the setting primary_file names, is missing or invalid: waiting for it")]
    NoSuchPrimary(String),
    /// Runtimes would load another file before inpod's.
    #[error(
        "owned_file {owned} does not sort before {other}, which runtimes would load: set owned_file to a name that does"
    )]
    SortsBehind { owned: String, other: String },
    /// The file that runtimes load lacks inpod's entry.
    #[error("runtimes load {0}, which has no entry of inpod")]
    NotEffective(String),
}

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

    /// Returns whether the whole file belongs to inpod, by its name.
    pub fn is_own(&self, name: &str) -> bool {
        name == self.owned_file || name == self.standalone_file
    }

    /// Removes the backups that Cilium made of inpod's files, because a later Cilium would restore these backups.
    pub(crate) fn remove_backups(&self, dir: &Path) -> io::Result<()> {
        for name in [&self.owned_file, &self.standalone_file] {
            inpod_service::remove_if_exists(&dir.join(format!("{name}.cilium_bak")))?;
        }
        Ok(())
    }

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

    /// Checks that the file that runtimes load contains inpod's entry.
    ///
    /// # Errors
    ///
    /// Fails if runtimes load no file, or a file without the entry.
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
            // The list was made from this single configuration, which must not come back.
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

    /// Returns the names of istio-cni's own files, including files that inpod removed.
    fn istio_files(&self) -> Vec<String> {
        let present = self
            .directory
            .files
            .iter()
            .filter(|file| is_istio_file(file));
        let mut names: Vec<_> = present.map(|file| file.name.clone()).collect();
        let removed = self.record.files.iter().filter(|(name, changed)| {
            let before = changed.before.as_ref().filter(|_| changed.ours.is_none());
            let file =
                before.map(|before| NetworkFile::new((*name).clone(), before.bytes().to_owned()));
            file.is_some_and(|file| is_istio_file(&file))
        });
        names.extend(removed.map(|(name, _)| name.clone()));
        names
    }

    fn primary(&self) -> Result<(&'a NetworkFile, &'a Conflist), PlanError> {
        let found = match &self.desired.primary_file {
            Some(name) => {
                let is_it = |file: &&NetworkFile| file.name == *name;
                // The owner may have turned the file into a list or back, or the installer may have made the list.
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

    /// Returns the single configuration that its owner wrote anew after inpod replaced it by a list.
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

    /// Returns the valid files that belong neither to inpod nor to istio-cni, in the order of the runtimes.
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

    /// Adds the reversal of earlier changes to files that the plan does not name.
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
    /// Returns the record with the changes of the plan, which is written before the changes are made.
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
        // The mode is filled in when the record is written.
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

/// Recognizes istio-cni's copy of a chain, or a list with only its plugin.
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
