//! Splits a plan into steps, each of which is one rename.

use std::path::Path;

use crate::Directory;

use crate::{
    error::ChainError,
    files::{self, ReplaceError},
    plan::{FileState, Plan},
    record::Record,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub name: String,
    pub action: Action,
    pub cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Create {
        content: Vec<u8>,
        /// The mode of an earlier file with this name, if there was one.
        mode: Option<u32>,
    },
    /// Replaces a file, and fails unless the file has the expected content.
    Replace {
        expected: Vec<u8>,
        content: Vec<u8>,
    },
    Remove,
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
    let step = |(name, state): (&String, &FileState)| {
        let file = directory.file(name);
        let action = match (state, file) {
            (FileState::Content(content), Some(file)) if file.content == *content => return None,
            (FileState::Content(content), None) => Action::Create {
                content: content.clone(),
                mode: record.files.get(name).and_then(|known| known.mode),
            },
            (FileState::Content(content), Some(file)) => Action::Replace {
                expected: file.content.clone(),
                content: content.clone(),
            },
            (FileState::Absent, Some(_)) => Action::Remove,
            (FileState::Absent, None) => return None,
        };
        let known = record.files.get(name);
        let cause = match known {
            None => Cause::First,
            Some(known) => {
                let left = known.ours.as_ref().map(|ours| ours.bytes().to_owned());
                let is_as_left = left.as_deref() == file.map(|file| file.content.as_slice());
                if is_as_left {
                    Cause::Followed
                } else {
                    Cause::TakenAway
                }
            }
        };
        Some(Step {
            name: name.clone(),
            action,
            cause,
        })
    };
    let mut steps: Vec<_> = plan.files.iter().filter_map(step).collect();
    steps.sort_by_key(|step| matches!(step.action, Action::Remove));
    steps
}

pub fn apply(dir: &Path, step: &Step) -> Result<(), ChainError> {
    let path = dir.join(&step.name);
    let write = |source| ChainError::Write {
        path: path.clone(),
        source,
    };
    match &step.action {
        Action::Create { content, mode } => {
            files::write_with_mode(dir, &step.name, content, *mode).map_err(write)
        }
        Action::Remove => files::remove_synced(dir, &step.name).map_err(write),
        Action::Replace { expected, content } => files::replace(dir, &step.name, expected, content)
            .map_err(|error| match error {
                ReplaceError::Raced => ChainError::Raced(path.clone()),
                ReplaceError::Io(source) => write(source),
            }),
    }
}
