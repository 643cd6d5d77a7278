//! From what the files are to what they are to be, one rename at a time.

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
    /// The file.
    pub name: String,
    /// What is done.
    pub action: Action,
    /// Why.
    pub cause: Cause,
}

/// What is done to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is put there, where there is none.
    Create {
        /// What it is to hold.
        content: Vec<u8>,
        /// Its permissions, where there was such a file before.
        mode: Option<u32>,
    },
    /// It is replaced, if it still holds what was read of it.
    Replace {
        /// What was read of it.
        expected: Vec<u8>,
        /// What it is to hold.
        content: Vec<u8>,
    },
    /// It is taken away.
    Remove,
}

/// Why a file is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It was never changed before.
    First,
    /// It is as we left it, but is to be something else: the primary or a setting has changed.
    Followed,
    /// Somebody has changed what we left.
    TakenAway,
}

impl Cause {
    /// The word in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Followed => "followed",
            Self::TakenAway => "taken-away",
        }
    }
}

/// The changes that a plan needs: what is put somewhere first, what is taken away last, so that a runtime finds one or
/// the other at any time.
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

/// Makes one change.
///
/// # Errors
///
/// When it cannot be made, or the file's owner was faster.
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
