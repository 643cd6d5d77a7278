//! Turns a plan into single steps, and applies each with one rename.

use std::path::Path;

use inpod_cni_config::Directory;

use crate::{
    error::ChainError,
    files::{self, ReplaceError},
    plan::{FileState, Plan},
    record::Record,
};

/// One change of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub name: String,
    pub action: Action,
    pub cause: Cause,
}

/// Change of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Create {
        content: Vec<u8>,
        /// Mode of the file, if there was one of this name before.
        mode: Option<u32>,
    },
    /// Replaces a file, if it still has the expected content.
    Replace {
        expected: Vec<u8>,
        content: Vec<u8>,
    },
    Remove,
}

/// Reason of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The file was never changed before.
    First,
    /// The file is as inpod left it; the primary or a setting has changed.
    Followed,
    /// Another component has changed what inpod wrote.
    TakenAway,
}

impl Cause {
    /// Returns the value of the metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Followed => "followed",
            Self::TakenAway => "taken-away",
        }
    }
}

/// Returns the steps that lead to a plan. Removals come last, so that runtimes find a network at any time.
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

/// Applies one step to the directory.
///
/// # Errors
///
/// If the change fails, or the file's owner was faster.
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
