//! What each file of the CNI directory is to be. Pure: the same files, settings and record give the same plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use inpod_cni_config::{Conflist, Directory, Entry, INCUMBENT, Loaded, NetworkFile, OURS, same};

use crate::{
    config::Config,
    entry, files,
    leave::{self, Return},
    mode::Mode,
    record::{Changed, Record},
};

/// What a file is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// There, with this content.
    Content(Vec<u8>),
    /// Not there.
    Absent,
}

/// What the files are to be. A file that is not named is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By name.
    pub wants: BTreeMap<String, Want>,
    /// Files that are as their owners want them afterwards: nothing of them needs to be remembered.
    pub forget: BTreeSet<String>,
}

/// Why there is no plan, or why it did not get inpod into the chain. Nothing is changed meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
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
    NotServed(String),
}

/// What is aimed at.
#[derive(Clone, Debug)]
pub struct Aim {
    mode: Mode,
    owned_file: String,
    standalone_file: String,
    primary_file: Option<String>,
    entry: Entry,
    standalone: Vec<u8>,
}

impl Aim {
    /// What the settings ask for.
    pub fn of(config: &Config) -> Self {
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
    pub fn plan(&self, directory: &Directory, record: &Record) -> Result<Plan, Trouble> {
        let view = View {
            aim: self,
            directory,
            record,
        };
        let mut wants = match self.mode {
            Mode::Owned => view.owned()?,
            Mode::InPlace => view.in_place()?,
            Mode::Standalone => view.standalone(),
        };
        for name in view.incumbents() {
            wants.insert(name, Want::Absent);
        }
        Ok(view.undone(wants))
    }

    /// Whether inpod is in the file that a runtime takes.
    ///
    /// # Errors
    ///
    /// When it is in none, or another.
    pub fn served(&self, directory: &Directory) -> Result<(), Trouble> {
        if self.mode == Mode::Standalone {
            let file = directory.file(&self.standalone_file);
            let is_there = file.is_some_and(|file| file.content == self.standalone);
            let missing = || Trouble::NoSuchPrimary(self.standalone_file.clone());
            return is_there.then_some(()).ok_or_else(missing);
        }
        let (file, list) = directory.first().ok_or(Trouble::NoPrimary)?;
        let ours = list.plugin(OURS);
        if ours.is_some_and(|plugin| same(plugin.text, &self.entry.text)) {
            return Ok(());
        }
        Err(Trouble::NotServed(file.name.clone()))
    }
}

/// What is looked at for one plan.
struct View<'a> {
    aim: &'a Aim,
    directory: &'a Directory,
    record: &'a Record,
}

impl<'a> View<'a> {
    fn owned(&self) -> Result<BTreeMap<String, Want>, Trouble> {
        let (_, list) = self.primary()?;
        let owned = &self.aim.owned_file;
        if let Some(first) = self
            .candidates()
            .next()
            .filter(|first| first.name <= *owned)
        {
            return Err(Trouble::SortsBehind {
                owned: owned.clone(),
                other: first.name.clone(),
            });
        }
        let content = list.replaced(INCUMBENT, &self.aim.entry);
        Ok([(owned.clone(), Want::Content(content))].into())
    }

    fn in_place(&self) -> Result<BTreeMap<String, Want>, Trouble> {
        let (file, list) = self.primary()?;
        let content = Want::Content(list.replaced(INCUMBENT, &self.aim.entry));
        let mut wants = BTreeMap::new();
        let stem = stem(&file.name);
        for single in [format!("{stem}.conf"), format!("{stem}.json")] {
            // One that a list stands for stays away.
            if file.name == single || self.is_taken_away(&single) {
                wants.insert(single, Want::Absent);
            }
        }
        wants.insert(format!("{stem}.conflist"), content);
        Ok(wants)
    }

    fn standalone(&self) -> BTreeMap<String, Want> {
        let content = Want::Content(self.aim.standalone.clone());
        [(self.aim.standalone_file.clone(), content)].into()
    }

    /// The files that are the incumbent's altogether: there now, or taken away before.
    fn incumbents(&self) -> Vec<String> {
        let there = self
            .directory
            .files
            .iter()
            .filter(|file| is_incumbents(file));
        let mut names: Vec<_> = there.map(|file| file.name.clone()).collect();
        let taken = self.record.files.iter().filter(|(name, changed)| {
            let before = changed.before.as_ref().filter(|_| changed.ours.is_none());
            let file =
                before.map(|before| NetworkFile::new((*name).clone(), before.bytes().to_owned()));
            file.is_some_and(|file| is_incumbents(&file))
        });
        names.extend(taken.map(|(name, _)| name.clone()));
        names
    }

    /// The primary's file and its list.
    fn primary(&self) -> Result<(&'a NetworkFile, &'a Conflist), Trouble> {
        let found = match &self.aim.primary_file {
            Some(name) => {
                let is_it = |file: &&NetworkFile| file.name == *name;
                // What became of it, or what its owner made of it.
                let is_sibling = |file: &&NetworkFile| stem(&file.name) == stem(name);
                let found = self.candidates().find(is_it);
                let found = found.or_else(|| self.candidates().find(is_sibling));
                Some(found.ok_or_else(|| Trouble::NoSuchPrimary(name.clone()))?)
            }
            None => self.candidates().next(),
        };
        let found = found.map(|file| self.returned(file).unwrap_or(file));
        let list = |file: &'a NetworkFile| Some((file, file.list()?));
        found.and_then(list).ok_or(Trouble::NoPrimary)
    }

    /// The single configuration that a list stands for, when its owner has written it anew.
    fn returned(&self, list: &NetworkFile) -> Option<&'a NetworkFile> {
        self.candidates().find(|file| {
            matches!(file.loaded, Ok(Loaded::Single(..)))
                && stem(&file.name) == stem(&list.name)
                && self.is_taken_away(&file.name)
        })
    }

    fn is_taken_away(&self, name: &str) -> bool {
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
            file.list().is_some() && !is_own && !self.aim.is_own(&file.name) && !is_incumbents(file)
        })
    }

    /// The plan that also takes back what an earlier one has made of files that this one does not name.
    fn undone(&self, mut wants: BTreeMap<String, Want>) -> Plan {
        let mut forget = BTreeSet::new();
        for (name, changed) in &self.record.files {
            if wants.contains_key(name) {
                continue;
            }
            let file = self.directory.file(name);
            if let Some(want) = leave::undo(changed, file, Return::Everything) {
                wants.insert(name.clone(), want);
            }
            forget.insert(name.clone());
        }
        Plan { wants, forget }
    }
}

impl Plan {
    /// What is to be remembered of the files that this plan changes or keeps.
    pub fn remembered(&self, aim: &Aim, directory: &Directory, record: &Record) -> Record {
        let mut remembered = record.clone();
        for (name, want) in &self.wants {
            let known = record.files.get(name);
            if self.forget.contains(name) {
                continue;
            }
            let changed = changed(aim.is_own(name), known, directory.file(name), want);
            remembered.files.insert(name.clone(), changed);
        }
        remembered
    }
}

fn changed(own: bool, known: Option<&Changed>, file: Option<&NetworkFile>, want: &Want) -> Changed {
    let ours = known.and_then(|known| known.ours.as_ref());
    let is_as_made = match (known, file) {
        (Some(_), Some(file)) => ours.is_some_and(|ours| ours.bytes() == file.content),
        (Some(_), None) => true,
        (None, _) => false,
    };
    let before = match (known, file) {
        _ if own => None,
        (Some(known), _) if is_as_made => known.before.clone(),
        (_, Some(file)) => Some(leave::bare(file).as_slice().into()),
        (_, None) => None,
    };
    let incumbent = file
        .and_then(NetworkFile::list)
        .and_then(|list| list.plugin(INCUMBENT));
    Changed {
        before,
        // Read from the file when the record is written.
        mode: known.and_then(|known| known.mode),
        own,
        ours: match want {
            Want::Content(content) => Some(content.as_slice().into()),
            Want::Absent => None,
        },
        incumbent: incumbent
            .map(|plugin| plugin.text.into())
            .or_else(|| known?.incumbent.clone()),
    }
}

/// Whether a file is the incumbent's altogether: its own copy of a chain, or its plugin alone.
pub(crate) fn is_incumbents(file: &NetworkFile) -> bool {
    file.list().is_some_and(|list| {
        let is_alone = list.plugins().all(|plugin| plugin.kind == INCUMBENT);
        is_alone || (file.name.contains(INCUMBENT) && list.plugin(INCUMBENT).is_some())
    })
}

fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
