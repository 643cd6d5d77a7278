//! Computes the CNI files as they are without inpod, without I/O.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;

use crate::{
    Conflist, Directory, INPOD_CNI, ISTIO_CNI, NetworkFile, Plugin,
    plan::{self, DesiredChain, FileState, Plan},
    record::{ChangedFile, Content, Record},
};

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

/// Restores the files that still have inpod's content, and removes inpod's entry from all others.
pub fn plan(
    directory: &Directory,
    record: &Record,
    desired: &DesiredChain,
    restore: Restore,
) -> Plan {
    let mut files = BTreeMap::new();
    for (name, changed) in &record.files {
        let state = revert(changed, directory.file(name), restore);
        files.extend(state.map(|state| (name.clone(), state)));
    }
    // These files have inpod's entry although no record names them, so the record was lost.
    for file in &directory.files {
        if record.files.contains_key(&file.name) {
            continue;
        }
        let state = remove_entry(file, None).map(|state| {
            if desired.is_own(&file.name) {
                FileState::Absent
            } else {
                state
            }
        });
        files.extend(state.map(|state| (file.name.clone(), state)));
    }
    for (name, state) in meta_files(directory, desired) {
        files.entry(name).or_insert(state);
    }
    let forget: BTreeSet<_> = record.files.keys().chain(files.keys()).cloned().collect();
    Plan { files, forget }
}

/// Returns the files of meta plugins without inpod in what they call. A meta plugin that copied inpod's entry does not
/// remove the entry when inpod's file vanishes (Multus 4.2 then waits for the file).
pub(crate) fn meta_files(
    directory: &Directory,
    desired: &DesiredChain,
) -> impl Iterator<Item = (String, FileState)> {
    directory.files.iter().filter_map(|file| {
        let content = without_calls(file, directory, desired)?;
        Some((file.name.clone(), FileState::Content(content)))
    })
}

/// Returns the file of a meta plugin without inpod in what it calls, or `None` if there is nothing to change.
pub(crate) fn without_calls(
    file: &NetworkFile,
    directory: &Directory,
    desired: &DesiredChain,
) -> Option<Vec<u8>> {
    let is_primary = |file: &&NetworkFile| {
        let is_network = file.list().is_some_and(|list| list.meta().is_none());
        is_network && !desired.is_own(&file.name) && !plan::is_istio_file(file)
    };
    let primary = directory.files.iter().find(is_primary);
    let primary = primary.map_or("", |file| &file.name);
    file.list()?.without_calls(&desired.owned_file, primary)
}

/// Returns the desired state of a changed file, or `None` if nothing is left to do.
pub fn revert(
    changed: &ChangedFile,
    file: Option<&NetworkFile>,
    restore: Restore,
) -> Option<FileState> {
    if changed.own {
        return file.map(|_| FileState::Absent);
    }
    match (&changed.ours, &changed.before, file) {
        // The removed list is istio-cni's copy of the primary, which no component would update any more.
        (None, Some(before), None)
            if restore == Restore::ExceptIstioCni && has_istio_entry(before) =>
        {
            None
        }
        (None, Some(before), None) => restored(before, changed, restore),
        // The owner has written another file, or has removed the file.
        (None, _, _) | (Some(_), _, None) => None,
        (Some(_), Some(before), Some(file)) if before.bytes() == file.content => None,
        (Some(ours), before, Some(file)) if ours.bytes() == file.content => match before {
            Some(before) => restored(before, changed, restore).or(Some(FileState::Absent)),
            None => Some(FileState::Absent),
        },
        (Some(_), _, Some(file)) => {
            let entry = changed
                .istio_entry
                .as_ref()
                .filter(|_| restore == Restore::WithIstioCni);
            remove_entry(file, entry)
        }
    }
}

/// Returns the restored file, or `None` if nothing is left to restore.
fn restored(before: &Content, changed: &ChangedFile, restore: Restore) -> Option<FileState> {
    let unchanged = || Some(FileState::Content(before.bytes().to_owned()));
    match restore {
        Restore::Everything => unchanged(),
        Restore::ExceptIstioCni => match Conflist::parse(before.bytes()) {
            Ok(list) if list.plugin(ISTIO_CNI).is_some() => {
                list.without(ISTIO_CNI).map(FileState::Content)
            }
            Ok(_) => unchanged(),
            Err(_) if is_istio_conf(before.bytes()) => None,
            Err(_) => unchanged(),
        },
        Restore::WithIstioCni => match (Conflist::parse(before.bytes()), &changed.istio_entry) {
            (Ok(list), Some(entry)) if list.plugin(ISTIO_CNI).is_none() => {
                let entry = istio_entry(entry)?;
                Some(FileState::Content(list.with(&entry, INPOD_CNI)))
            }
            _ => unchanged(),
        },
    }
}

/// Removes inpod's entry, or replaces the entry by `entry` of istio-cni. Returns `None` if the file lacks inpod's
/// entry.
fn remove_entry(file: &NetworkFile, entry: Option<&Content>) -> Option<FileState> {
    let list = file.list()?;
    list.plugin(INPOD_CNI)?;
    let without = match entry.and_then(istio_entry) {
        Some(entry) => Some(list.with(&entry, INPOD_CNI)),
        None => list.without(INPOD_CNI),
    };
    Some(without.map_or(FileState::Absent, FileState::Content))
}

pub(crate) fn without_inpod(file: &NetworkFile) -> Vec<u8> {
    let list = file.list().filter(|list| !list.is_single);
    let without = list.and_then(|list| list.without(INPOD_CNI));
    without.unwrap_or_else(|| file.content.clone())
}

fn has_istio_entry(content: &Content) -> bool {
    Conflist::parse(content.bytes()).is_ok_and(|list| list.plugin(ISTIO_CNI).is_some())
}

/// Returns whether the text is a single configuration of istio-cni.
fn is_istio_conf(text: &[u8]) -> bool {
    Conflist::parse_single(text).is_ok_and(|list| list.plugin(ISTIO_CNI).is_some())
}

fn istio_entry(entry: &Content) -> Option<Plugin> {
    let text = String::from_utf8_lossy(entry.bytes()).into_owned();
    Plugin::new(RawValue::from_string(text).ok()?).ok()
}
