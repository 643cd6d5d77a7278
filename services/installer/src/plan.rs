//! Computes the CNI files with inpod from the present files, the settings and the record, without I/O.

use std::collections::BTreeMap;

use inpod_cni::version::SpecVersion;

use crate::{
    Conflist, Directory, INPOD_CNI, ISTIO_CNI, Malformed, NetworkFile, Plugin, Runtime,
    config::Config,
    directory::MAX_BYTES,
    entry,
    mode::Mode,
    record::{ChangedFile, Record},
};

/// The desired content of files by name; `None` stands for a file that must not exist.
pub type Files = BTreeMap<String, Option<Vec<u8>>>;

/// The desired state of files; all other files are left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub files: Files,
    /// The files that differ because of inpod after the plan, and no file if inpod leaves. All other files belong to their
    /// owners again.
    pub changed: BTreeMap<String, ChangedFile>,
    /// The file whose network inpod's copy has.
    pub joined: Option<String>,
}

/// Selects which of istio-cni's files and entries a removal restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restore {
    /// Restores every file as it was, including the files of istio-cni.
    Everything,
    /// Restores everything except istio-cni's entry and files: the entry fails every pod if its plugin is missing.
    ExceptIstioCni,
    /// Restores everything, and puts istio-cni's entry even into a file that its owner has rewritten without the entry.
    WithIstioCni,
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
    /// containerd loads no network behind an invalid file, so inpod must not lead the runtime to another network.
    #[error(
        "{file} is invalid: {why}; inpod changes nothing meanwhile, because the file may be the node's network: repair or remove the file, or set primary_file to the network's file"
    )]
    Invalid { file: String, why: Malformed },
    #[error(
        "the plugin does not speak the cniVersion {version:?} of {file}, but {}: upgrade inpod, or change the file", .spoken.join(", ")
    )]
    Version {
        file: String,
        version: String,
        spoken: Vec<String>,
    },
    #[error(
        "{}max_conf_num is {networks}, so the runtime attaches a pod to several networks, and a copy of one would be another: set mode=in-place", .file
    )]
    Networks { file: String, networks: i64 },
    /// Runtimes would load another file before inpod's.
    #[error(
        "owned_file {owned} does not sort before {other}, which runtimes would load: set owned_file to a name that does"
    )]
    SortsBehind { owned: String, other: String },
    /// Runtimes would load inpod's file instead of the meta plugin's.
    #[error(
        "owned_file {owned} sorts before {other}, so runtimes would not call {kind} any more: set owned_file to a name behind it"
    )]
    SortsBefore {
        owned: String,
        other: String,
        kind: String,
    },
    #[error(
        "{file} calls {kind}, which makes no network, and no other file has a network to join: set mode=in-place"
    )]
    OnlyMeta { file: String, kind: String },
    #[error(
        "{kind} in {file} does not call {wanted}: restart {kind} if it generates {file} (Multus: without a fixed master file, or with multusMasterCNI or --multus-master-cni-file-name set to {wanted}), or set mode=in-place"
    )]
    NotCalled {
        file: String,
        kind: String,
        wanted: String,
    },
    #[error(
        "{0} is a symbolic link, which inpod does not replace by a file: set mode=owned, and remove an entry of inpod from the link's target"
    )]
    Link(String),
    /// A list that inpod makes of the single configuration would have the name of the other.
    #[error(
        "{file} and {other} are both there, and inpod would have to replace {other}: remove the outdated file"
    )]
    Twofold { file: String, other: String },
    #[error("owned_file {0} exists already and is not inpod's: set owned_file to another name")]
    Foreign(String),
    #[error("{file} calls {owned}, and no other network is known: set another one there first")]
    StillCalled { file: String, owned: String },
    #[error(
        "{file} calls inpod-cni {calls} times for each pod: remove inpod's entry from all places but one"
    )]
    CalledTwice { file: String, calls: usize },
    /// The file that runtimes load lacks inpod's entry.
    #[error("runtimes load {0}, which has no entry of inpod")]
    NotEffective(String),
}

#[derive(Clone, Debug)]
pub struct DesiredChain {
    mode: Mode,
    pub(crate) owned_file: String,
    pub(crate) standalone_file: String,
    primary_file: Option<String>,
    entry: Plugin,
    standalone: Vec<u8>,
    pub(crate) runtime: Runtime,
    /// The versions of the CNI spec that the installed plugin speaks.
    pub(crate) spoken: Vec<String>,
    /// Selects the content of files that inpod no longer changes.
    pub(crate) restore: Restore,
}

impl DesiredChain {
    pub fn new(config: &Config) -> Self {
        Self {
            mode: config.mode,
            owned_file: config.owned_file.clone(),
            standalone_file: config.standalone_file.clone(),
            primary_file: config.primary_file.clone(),
            entry: entry::entry(config),
            standalone: entry::standalone(config),
            runtime: Runtime::default(),
            spoken: SpecVersion::ALL.map(|it| it.as_str().to_owned()).into(),
            restore: Restore::Everything,
        }
    }

    /// Returns whether the whole file belongs to inpod, by its name.
    pub fn is_own(&self, name: &str) -> bool {
        name == self.owned_file || name == self.standalone_file
    }

    pub fn plan(&self, directory: &Directory, record: &Record) -> Result<Plan, PlanError> {
        let planner = Planner {
            desired: self,
            directory,
            record,
            restore: self.restore,
        };
        let mut joined = None;
        let mut wanted = match self.mode {
            Mode::Owned => {
                let (files, primary) = planner.owned()?;
                joined = Some(primary);
                files
            }
            Mode::InPlace => planner.in_place()?,
            Mode::Standalone => planner.standalone(),
        };
        wanted.extend(planner.istio_files().map(|name| (name, None)));
        let plan = planner.plan_for(wanted)?;
        Ok(Plan { joined, ..plan })
    }

    /// Computes the files as they are without inpod.
    ///
    /// # Errors
    ///
    /// Fails if inpod's entry cannot be removed.
    pub fn removal(
        &self,
        directory: &Directory,
        record: &Record,
        restore: Restore,
    ) -> Result<Plan, PlanError> {
        let planner = Planner {
            desired: self,
            directory,
            record,
            restore,
        };
        planner.plan_for(Files::new())
    }

    /// Loads the network as runtimes do, and checks that each pod's chain calls inpod once.
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
        let (file, list) = self.first_network(&directory.files)?;
        let called = list.called_file(&self.runtime.conf_dir);
        let called = called.and_then(|name| directory.file(&name)?.list());
        let calls = called.map(Conflist::calls).unwrap_or_default();
        let calls = [list.calls(), calls].concat();
        let file = file.name.clone();
        match (calls.as_slice(), list.meta()) {
            ([call], _) if call.is_equal(&self.entry) => Ok(()),
            ([_, _, ..], _) => {
                let calls = calls.len();
                Err(PlanError::CalledTwice { file, calls })
            }
            (_, None) => Err(PlanError::NotEffective(file)),
            (_, Some(kind)) => Err(PlanError::NotCalled {
                file,
                kind: kind.to_owned(),
                wanted: self.joined_file(),
            }),
        }
    }

    /// Returns the name of the file that a meta plugin should call.
    fn joined_file(&self) -> String {
        match (&self.primary_file, self.mode) {
            (Some(name), Mode::InPlace) => name.clone(),
            _ => self.owned_file.clone(),
        }
    }

    /// Returns the file from which runtimes take the network.
    fn first_network<'a>(
        &self,
        files: impl IntoIterator<Item = &'a NetworkFile>,
    ) -> Result<Network<'a>, PlanError> {
        for file in files {
            let list = file.loaded.as_ref().map_err(|why| PlanError::Invalid {
                file: file.name.clone(),
                why: why.clone(),
            })?;
            if self.is_selected(list) {
                return Ok((file, list));
            }
        }
        Err(PlanError::NoPrimary)
    }

    /// Returns whether the runtime may use the network: CRI-O may select a network by name.
    fn is_selected(&self, list: &Conflist) -> bool {
        let name = self.runtime.network.as_ref();
        name.is_none_or(|name| *name == list.name)
    }
}

/// A network with its file.
type Network<'a> = (&'a NetworkFile, &'a Conflist);

pub(crate) struct Planner<'a> {
    pub(crate) desired: &'a DesiredChain,
    pub(crate) directory: &'a Directory,
    pub(crate) record: &'a Record,
    pub(crate) restore: Restore,
}

impl<'a> Planner<'a> {
    /// Returns inpod's copy, and the name of the copied file.
    fn owned(&self) -> Result<(Files, String), PlanError> {
        let runtime = &self.desired.runtime;
        if runtime.networks != 1 {
            let file = runtime.source.as_ref();
            return Err(PlanError::Networks {
                file: file.map_or_else(String::new, |file| format!("{}: ", file.display())),
                networks: runtime.networks,
            });
        }
        let (file, list) = self.primary()?;
        let owned = self.desired.owned_file.clone();
        let is_ours = |list: &Conflist| list.plugin(INPOD_CNI).is_some();
        let present = self.directory.file(&owned).and_then(NetworkFile::list);
        if !self.record.files.contains_key(&owned) && present.is_some_and(|list| !is_ours(list)) {
            return Err(PlanError::Foreign(owned));
        }
        // Runtimes load inpod's file first, or a meta plugin that calls inpod's file.
        let mut others = self.candidates().filter(|(_, list)| list.meta().is_none());
        if let Some((other, _)) = others.next().filter(|(other, _)| other.name <= owned) {
            let other = other.name.clone();
            return Err(PlanError::SortsBehind { owned, other });
        }
        if let Some((meta, kind)) = self.leading_meta().filter(|(meta, _)| owned < meta.name) {
            let (other, kind) = (meta.name.clone(), kind.to_owned());
            return Err(PlanError::SortsBefore { owned, other, kind });
        }
        let content = self.joined_list(file, list)?;
        Ok(([(owned, Some(content))].into(), file.name.clone()))
    }

    fn in_place(&self) -> Result<Files, PlanError> {
        let (file, list) = self.primary()?;
        if file.is_link {
            return Err(PlanError::Link(file.name.clone()));
        }
        // A meta plugin's file may hold calls already, and a pod's chain calls inpod once.
        let left = self.without_calls(file);
        let left = left.and_then(|text| NetworkFile::new(file.name.clone(), text).loaded.ok());
        let content = self.joined_list(file, left.as_ref().unwrap_or(list))?;
        let stem = stem(&file.name);
        let other = format!("{stem}.conflist");
        let known = self.record.files.get(&other);
        let is_ours = known.is_some_and(|known| known.before.is_none());
        if list.is_single && !is_ours && self.directory.file(&other).is_some() {
            let file = file.name.clone();
            return Err(PlanError::Twofold { file, other });
        }
        let mut files = Files::from([(other, Some(content))]);
        for single in [format!("{stem}.conf"), format!("{stem}.json")] {
            // The list was made from this single configuration, which must not come back.
            if file.name == single || self.is_removed(&single) {
                files.insert(single, None);
            }
        }
        Ok(files)
    }

    fn standalone(&self) -> Files {
        let content = self.desired.standalone.clone();
        [(self.desired.standalone_file.clone(), Some(content))].into()
    }

    /// Returns the names of istio-cni's own files, including files that inpod removed.
    fn istio_files(&self) -> impl Iterator<Item = String> {
        let removed = self.record.files.iter().filter_map(|(name, changed)| {
            let before = changed.removed()?.bytes().to_owned();
            Some(NetworkFile::new(name.clone(), before))
        });
        let files = self.directory.files.iter().cloned().chain(removed);
        files.filter(is_istio_file).map(|file| file.name)
    }

    /// Returns the file with the network that inpod joins. A meta plugin's own list is never copied.
    fn primary(&self) -> Result<Network<'a>, PlanError> {
        let may_be_meta = self.desired.mode != Mode::Owned;
        let found = match &self.desired.primary_file {
            Some(name) => {
                // The owner may have turned the file into a list or back, or the installer may have made the list.
                let forms = self.candidates();
                let forms = forms.filter(|(file, _)| stem(&file.name) == stem(name));
                let found = forms.min_by_key(|(file, _)| file.name != *name);
                found.ok_or_else(|| PlanError::NoSuchPrimary(name.clone()))
            }
            None => {
                let files = self.foreign_files();
                let files = files.filter(|file| may_be_meta || !file.is_meta());
                self.desired.first_network(files)
            }
        };
        let meta = match &found {
            Ok((file, list)) if !may_be_meta => Some(*file).zip(list.meta()),
            Err(PlanError::NoPrimary) => self.leading_meta(),
            _ => None,
        };
        if let Some((file, kind)) = meta {
            let (file, kind) = (file.name.clone(), kind.to_owned());
            return Err(PlanError::OnlyMeta { file, kind });
        }
        let (file, list) = found?;
        Ok(self.rewritten_single(file).unwrap_or((file, list)))
    }

    /// Returns the file and the type of the meta plugin that runtimes call first.
    fn leading_meta(&self) -> Option<(&'a NetworkFile, &'a str)> {
        let (file, list) = self.candidates().next()?;
        Some((file, list.meta()?))
    }

    /// Returns the list with inpod's entry, in versions that the plugin speaks.
    fn joined_list(&self, file: &NetworkFile, list: &Conflist) -> Result<Vec<u8>, PlanError> {
        let spoken = &self.desired.spoken;
        let version = list.versions.first().map_or("", String::as_str);
        // A missing version is 0.1.0, and runtimes hand on the empty text.
        let needed = if version.is_empty() { "0.1.0" } else { version };
        let file = file.name.clone();
        if !spoken.iter().any(|it| it == needed) {
            return Err(PlanError::Version {
                file,
                version: version.to_owned(),
                spoken: spoken.clone(),
            });
        }
        let content = list.speaking(spoken).with(&self.desired.entry, ISTIO_CNI);
        if u64::try_from(content.len()).is_ok_and(|length| length > MAX_BYTES) {
            let why = Malformed::TooLarge;
            return Err(PlanError::Invalid { file, why });
        }
        Ok(content)
    }

    /// Returns the single configuration that its owner wrote anew after inpod replaced it by a list.
    fn rewritten_single(&self, list: &NetworkFile) -> Option<Network<'a>> {
        self.candidates().find(|(file, single)| {
            single.is_single && stem(&file.name) == stem(&list.name) && self.is_removed(&file.name)
        })
    }

    fn is_removed(&self, name: &str) -> bool {
        let changed = self.record.files.get(name);
        changed.is_some_and(|changed| changed.removed().is_some())
    }

    /// Returns the files that belong neither to inpod nor to istio-cni, in the order of the runtimes.
    fn foreign_files(&self) -> impl Iterator<Item = &'a NetworkFile> {
        self.directory.files.iter().filter(|file| {
            let changed = self.record.files.get(&file.name);
            let is_own = changed.is_some_and(|changed| changed.own);
            !is_own && !self.desired.is_own(&file.name) && !is_istio_file(file)
        })
    }

    /// Returns the files of [`Self::foreign_files`] from which the runtime may take the network.
    fn candidates(&self) -> impl Iterator<Item = Network<'a>> {
        let files = self.foreign_files();
        let valid = files.filter_map(|file| Some((file, file.list()?)));
        valid.filter(|(_, list)| self.desired.is_selected(list))
    }
}

/// Recognizes istio-cni's copy of a chain, or a list with only its plugin.
pub(crate) fn is_istio_file(file: &NetworkFile) -> bool {
    file.list().is_some_and(|list| {
        let is_alone = list.plugins.iter().all(|plugin| plugin.kind == ISTIO_CNI);
        is_alone || (file.name.contains(ISTIO_CNI) && list.plugin(ISTIO_CNI).is_some())
    })
}

pub(crate) fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
