//! Writes the state of the ztunnel as a JSON file, which is replaced atomically.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::enter::NetnsId;

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct State {
    pub(crate) connected: bool,
    /// The ztunnel is connected, the snapshot is complete, and no pod is pending.
    pub(crate) ready: bool,
    /// The snapshot of the last connection was complete.
    pub(crate) snapshot_complete: bool,
    /// The pods of the node, sorted by UID.
    pub(crate) pods: Vec<PodState>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct PodState {
    pub(crate) uid: String,
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) state: Phase,
    pub(crate) netns: NetnsId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    Running,
    /// Opening the listeners of the pod failed; ztunnel retries.
    Pending,
}

#[derive(Debug)]
pub(crate) struct StateFile {
    path: Option<PathBuf>,
    last: Option<State>,
}

impl StateFile {
    pub(crate) const fn new(path: Option<PathBuf>) -> Self {
        Self { path, last: None }
    }

    pub(crate) fn publish(&mut self, state: State) {
        if self.last.as_ref() == Some(&state) {
            return;
        }
        if let Some(path) = &self.path
            && let Err(error) = replace(path, &state)
        {
            tracing::warn!(%error, path = %path.display(), "failed to write the state file");
        }
        self.last = Some(state);
    }
}

/// Replaces the file by rename, so that a reader never sees a part of the content. Only a regular file is replaced,
/// because a rename would replace a device, too.
fn replace(path: &Path, state: &State) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io::Error::other("what is there is no regular file"));
    }
    let mut next = path.as_os_str().to_owned();
    next.push(".next");
    fs::write(&next, serde_json::to_vec(state)?)?;
    fs::rename(&next, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_holds_the_last_state() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("state.json");
        let mut file = StateFile::new(Some(path.clone()));
        for connected in [false, true] {
            file.publish(State {
                connected,
                ready: false,
                snapshot_complete: false,
                pods: vec![],
            });
        }
        assert_eq!(
            fs::read_to_string(path).expect("read"),
            r#"{"connected":true,"ready":false,"snapshot_complete":false,"pods":[]}"#
        );
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let directory = tempfile::tempdir().expect("tempdir");
        let (path, target) = (
            directory.path().join("state.json"),
            directory.path().join("target"),
        );
        std::os::unix::fs::symlink(&target, &path).expect("symlink");
        StateFile::new(Some(path.clone())).publish(State {
            connected: true,
            ready: false,
            snapshot_complete: false,
            pods: vec![],
        });
        assert!(fs::symlink_metadata(&path).expect("stat").is_symlink());
        assert!(!directory.path().join("state.json.next").exists());
    }
}
