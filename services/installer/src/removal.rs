//! Computes the CNI files as they are without inpod, without I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Conflist, Directory, Entry, INPOD_CNI, ISTIO_CNI, Loaded, NetworkFile};

use crate::{
    plan::{DesiredChain, FileState, Plan},
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
    let forget: BTreeSet<_> = record.files.keys().chain(files.keys()).cloned().collect();
    Plan { files, forget }
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
            Ok(list) if list.plugin(ISTIO_CNI).is_some() => if_not_empty(list.without(ISTIO_CNI)),
            Ok(_) => unchanged(),
            Err(_) if is_istio_conf(before.bytes()) => None,
            Err(_) => unchanged(),
        },
        Restore::WithIstioCni => match (Conflist::parse(before.bytes()), &changed.istio_entry) {
            (Ok(list), Some(entry)) if list.plugin(ISTIO_CNI).is_none() => {
                Some(FileState::Content(list.with(&istio_entry(entry))))
            }
            _ => unchanged(),
        },
    }
}

/// Removes inpod's entry, or replaces the entry by `entry` of istio-cni. Returns `None` if the file lacks inpod's
/// entry.
fn remove_entry(file: &NetworkFile, entry: Option<&Content>) -> Option<FileState> {
    match file.loaded.as_ref().ok()? {
        Loaded::Single(conf, _) => (conf.kind() == INPOD_CNI).then_some(FileState::Absent),
        Loaded::List(list) => {
            list.plugin(INPOD_CNI)?;
            let without = match entry {
                Some(entry) => list.replaced(INPOD_CNI, &istio_entry(entry)),
                None => list.without(INPOD_CNI),
            };
            if_not_empty(without).or(Some(FileState::Absent))
        }
    }
}

pub(crate) fn without_inpod(file: &NetworkFile) -> Vec<u8> {
    match file.list() {
        Some(list) if list.text() == file.content && list.plugin(INPOD_CNI).is_some() => {
            list.without(INPOD_CNI)
        }
        Some(_) | None => file.content.clone(),
    }
}

/// Returns the content of the file, or `None` if no plugin is left in the list.
fn if_not_empty(text: Vec<u8>) -> Option<FileState> {
    Conflist::parse(&text)
        .is_ok()
        .then_some(FileState::Content(text))
}

fn has_istio_entry(content: &Content) -> bool {
    Conflist::parse(content.bytes()).is_ok_and(|list| list.plugin(ISTIO_CNI).is_some())
}

/// Returns whether the text is a single configuration of istio-cni.
fn is_istio_conf(text: &[u8]) -> bool {
    crate::Conf::parse(text).is_ok_and(|conf| conf.kind() == ISTIO_CNI)
}

fn istio_entry(entry: &Content) -> Entry {
    Entry {
        kind: ISTIO_CNI.to_owned(),
        text: entry.bytes().to_owned(),
    }
}
