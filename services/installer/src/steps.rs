//! Splits a plan into steps, each of which is one rename.

use std::{io::ErrorKind, path::Path};

use crate::{Directory, error::ChainError, files, plan::Plan, record::Record};

/// The change of a file to `content`, which fails unless the file is as `expected`; `None` is a file that does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub name: String,
    pub expected: Option<Vec<u8>>,
    pub content: Option<Vec<u8>>,
    /// The mode of a new file.
    pub mode: u32,
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// inpod changes the file for the first time.
    First,
    /// The file is as inpod left it, but the primary or the settings have changed.
    Followed,
    /// Another component has changed the content that inpod wrote.
    TakenAway,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Followed => "followed",
            Self::TakenAway => "taken-away",
        }
    }
}

/// Returns the steps that lead to the plan. Removals come last, because runtimes must find a network at all times.
pub fn diff(plan: &Plan, directory: &Directory, record: &Record) -> Vec<Step> {
    let step = |(name, content): (&String, &Option<Vec<u8>>)| {
        let (known, file) = (record.files.get(name), directory.file(name));
        let is_own = plan.changed.get(name).or(known).is_some_and(|it| it.own);
        // In place of inpod's file, anything but a regular file is replaced.
        let file = file.filter(|file| file.is_regular || !is_own);
        let is_replaced = is_own && directory.file(name).is_some() && file.is_none();
        let expected = file.map(|file| file.content.clone());
        let cause = match known {
            None => Cause::First,
            Some(known) if known.is_as_left(file) => Cause::Followed,
            Some(_) => Cause::TakenAway,
        };
        (expected != *content || is_replaced).then(|| Step {
            name: name.clone(),
            expected,
            content: content.clone(),
            mode: known.and_then(|known| known.mode).unwrap_or(0o600),
            cause,
        })
    };
    let mut steps: Vec<_> = plan.files.iter().filter_map(step).collect();
    steps.sort_by_key(|step| step.content.is_none());
    steps
}

pub fn apply(dir: &Path, step: &Step) -> Result<(), ChainError> {
    let (path, name) = (dir.join(&step.name), &step.name);
    let changed = match (&step.expected, &step.content) {
        (expected, None) => files::remove(dir, name, expected.as_deref()),
        (Some(expected), Some(content)) => files::replace(dir, name, expected, content),
        (None, Some(content)) => files::write(dir, name, content, step.mode).map(|()| true),
    };
    match changed {
        Ok(true) => Ok(()),
        Err(source) if step.expected.is_none() || source.kind() != ErrorKind::NotFound => {
            Err(ChainError::Write { path, source })
        }
        // A file that does not exist any more does not have the expected content either.
        Ok(false) | Err(_) => Err(ChainError::Raced(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_for_a_file_that_vanished_is_raced() {
        let dir = tempfile::tempdir().unwrap();
        let step = |expected: Option<&[u8]>, content: Option<&[u8]>| Step {
            name: "a.conflist".to_owned(),
            expected: expected.map(<[u8]>::to_owned),
            content: content.map(<[u8]>::to_owned),
            mode: 0o600,
            cause: Cause::Followed,
        };
        for content in [None, Some(b"new".as_slice())] {
            let applied = apply(dir.path(), &step(Some(b"old"), content));
            assert!(matches!(applied, Err(ChainError::Raced(_))), "{content:?}");
        }
        let missing = dir.path().join("missing");
        let applied = apply(&missing, &step(None, Some(b"new")));
        assert!(matches!(applied, Err(ChainError::Write { .. })));
    }
}
