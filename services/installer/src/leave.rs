//! What each file is to be when inpod goes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use inpod_cni_config::{Conflist, Directory, Entry, INCUMBENT, Loaded, NetworkFile, OURS};

use crate::{
    plan::{Aim, Plan, Want},
    record::{Changed, Content, Record},
};

/// What becomes of the incumbent's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// Every byte comes back, the incumbent's with the others.
    Everything,
    /// Without the incumbent's entry, and without the files that are its altogether: its plugin is gone, and an entry
    /// without a plugin fails every pod.
    NoIncumbent,
    /// With the incumbent's entry, also where the file's owner has written it anew without.
    Incumbent,
}

/// What the files are to be without inpod: as they were, if they are still what we made of them, else as they are
/// without our entry.
pub fn plan(directory: &Directory, record: &Record, aim: &Aim, back: Return) -> Plan {
    let mut wants = BTreeMap::new();
    for (name, changed) in &record.files {
        let want = undo(changed, directory.file(name), back);
        wants.extend(want.map(|want| (name.clone(), want)));
    }
    // What no record knows of, because it was lost.
    for file in &directory.files {
        if record.files.contains_key(&file.name) {
            continue;
        }
        let want = spliced(file, None).map(|want| {
            if aim.is_own(&file.name) {
                Want::Absent
            } else {
                want
            }
        });
        wants.extend(want.map(|want| (file.name.clone(), want)));
    }
    let forget: BTreeSet<_> = record.files.keys().chain(wants.keys()).cloned().collect();
    Plan { wants, forget }
}

/// What a file is to be without what we made of it; `None` if it is so already.
pub fn undo(changed: &Changed, file: Option<&NetworkFile>, back: Return) -> Option<Want> {
    if changed.own {
        return file.map(|_| Want::Absent);
    }
    match (&changed.ours, &changed.before, file) {
        // A list that was taken away is the incumbent's copy of the primary, which nobody keeps up without it.
        (None, Some(before), None) if back == Return::NoIncumbent && lists_incumbent(before) => {
            None
        }
        (None, Some(before), None) => returned(before, changed, back),
        // Its owner has put another one there, or there never was one.
        (None, _, _) | (Some(_), _, None) => None,
        (Some(_), Some(before), Some(file)) if before.bytes() == file.content => None,
        (Some(ours), before, Some(file)) if ours.bytes() == file.content => match before {
            Some(before) => returned(before, changed, back).or(Some(Want::Absent)),
            None => Some(Want::Absent),
        },
        (Some(_), _, Some(file)) => {
            let incumbent = changed
                .incumbent
                .as_ref()
                .filter(|_| back == Return::Incumbent);
            spliced(file, incumbent)
        }
    }
}

/// A content that comes back; `None` where nothing of it does.
fn returned(before: &Content, changed: &Changed, back: Return) -> Option<Want> {
    let as_it_was = || Some(Want::Content(before.bytes().to_owned()));
    match back {
        Return::Everything => as_it_was(),
        Return::NoIncumbent => match Conflist::parse(before.bytes()) {
            Ok(list) if list.plugin(INCUMBENT).is_some() => valid(list.without(INCUMBENT)),
            Ok(_) => as_it_was(),
            Err(_) if alone(before.bytes()) => None,
            Err(_) => as_it_was(),
        },
        Return::Incumbent => match (Conflist::parse(before.bytes()), &changed.incumbent) {
            (Ok(list), Some(incumbent)) if list.plugin(INCUMBENT).is_none() => {
                Some(Want::Content(list.with(&entry(incumbent))))
            }
            _ => as_it_was(),
        },
    }
}

/// A file without our entry; with the incumbent's in its place where it is given. `None` if ours is not in it.
fn spliced(file: &NetworkFile, incumbent: Option<&Content>) -> Option<Want> {
    match file.loaded.as_ref().ok()? {
        Loaded::Single(conf, _) => (conf.kind() == OURS).then_some(Want::Absent),
        Loaded::List(list) => {
            list.plugin(OURS)?;
            let without = match incumbent {
                Some(incumbent) => list.replaced(OURS, &entry(incumbent)),
                None => list.without(OURS),
            };
            valid(without).or(Some(Want::Absent))
        }
    }
}

/// A file's content without our entry.
pub(crate) fn bare(file: &NetworkFile) -> Vec<u8> {
    match file.list() {
        Some(list) if list.text() == file.content && list.plugin(OURS).is_some() => {
            list.without(OURS)
        }
        Some(_) | None => file.content.clone(),
    }
}

/// A list of which something is left.
fn valid(text: Vec<u8>) -> Option<Want> {
    Conflist::parse(&text)
        .is_ok()
        .then_some(Want::Content(text))
}

/// Whether a list has the incumbent's entry.
fn lists_incumbent(content: &Content) -> bool {
    Conflist::parse(content.bytes()).is_ok_and(|list| list.plugin(INCUMBENT).is_some())
}

/// Whether a single configuration is the incumbent's.
fn alone(text: &[u8]) -> bool {
    inpod_cni_config::Conf::parse(text).is_ok_and(|conf| conf.kind() == INCUMBENT)
}

fn entry(incumbent: &Content) -> Entry {
    Entry {
        kind: INCUMBENT.to_owned(),
        text: incumbent.bytes().to_owned(),
    }
}
