//! Uninstall and handover: notifies a service of the request to leave the node, and reports when the service is done.
//!
//! The request is a file from a ConfigMap, and the receipt is a file for the container's termination message, so that
//! neither needs a right at the API server.

use std::{
    fmt, fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::{read_bounded_text, remove_if_exists};

/// The interval is short compared with the kubelet, which takes about a minute to deliver a changed ConfigMap.
const READ_INTERVAL: Duration = Duration::from_secs(5);

/// The limit of the request's size.
const MAX_BYTES: u64 = 4096;

/// The text with which every receipt begins.
pub const RECEIPT_PREFIX: &str = "inpod left:";

/// Determines how much of inpod stays on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UninstallMode {
    /// Nothing stays, because all changes are reverted.
    Uninstall,
    /// Rules, listeners and annotations stay, for the next agent in the chain.
    Handover,
}

impl UninstallMode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uninstall => "uninstall",
            Self::Handover => "handover",
        }
    }
}

/// Parses the request; `None` means that inpod stays.
///
/// # Errors
///
/// Fails with the start of the invalid content.
pub fn parse(text: &str) -> Result<Option<UninstallMode>, String> {
    match text.trim() {
        "" => Ok(None),
        "uninstall" => Ok(Some(UninstallMode::Uninstall)),
        "handover" => Ok(Some(UninstallMode::Handover)),
        other => Err(other.chars().take(40).collect()),
    }
}

impl fmt::Display for UninstallMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads the request. Without a file, the marker decides: deleting a release deletes the ConfigMap while its processes
/// still run, and a finished node must stay finished.
///
/// # Errors
///
/// Fails if the file is unreadable or invalid.
pub fn read(file: &Path, marker: &Marker) -> Result<Option<UninstallMode>, String> {
    let shown = file.display();
    let text = match read_bounded_text(file, MAX_BYTES) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(marker.get());
        }
        Err(error) => return Err(format!("cannot read {shown}: {error}")),
    };
    parse(&text).map_err(|content| {
        format!("{shown} contains {content:?}; expected uninstall, handover or nothing")
    })
}

/// Watches the request. Invalid content is ignored, so that a typo uninstalls nothing.
pub fn watch(file: PathBuf, marker: Marker) -> watch::Receiver<Option<UninstallMode>> {
    let first = read(&file, &marker).unwrap_or_default();
    let (sender, receiver) = watch::channel(first);
    let follows = async move {
        let mut ticks = interval(READ_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut problem = None;
        while !sender.is_closed() {
            ticks.tick().await;
            let result = read(&file, &marker);
            if result.as_ref().err() != problem.as_ref()
                && let Err(error) = &result
            {
                tracing::error!(
                    error,
                    "Cannot read the uninstall mode; the previous one stays in force"
                );
            }
            if let Ok(now) = result {
                sender.send_if_modified(|was| std::mem::replace(was, now) != now);
            }
            problem = result.err();
        }
    };
    tokio::spawn(crate::abort_on_panic("leave", follows));
    receiver
}

/// A file next to the service's socket, which records across restarts that the service is done on this node.
#[derive(Clone, Debug)]
pub struct Marker(PathBuf);

impl Marker {
    /// Returns a marker that lasts until the next boot, or until the directory is emptied
    /// (`Daemon::remove_state_on_exit`).
    pub fn in_directory(directory: &Path) -> Self {
        Self(directory.join("left"))
    }

    pub fn is_set(&self, mode: UninstallMode) -> bool {
        self.get() == Some(mode)
    }

    fn get(&self) -> Option<UninstallMode> {
        let text = read_bounded_text(&self.0, MAX_BYTES).ok()?;
        parse(&text).ok().flatten()
    }

    pub fn set(&self, mode: UninstallMode) -> io::Result<()> {
        fs::write(&self.0, mode.as_str())
    }

    pub fn clear(&self) -> io::Result<()> {
        remove_if_exists(&self.0)
    }
}

/// Writes the receipt as one line.
pub fn write_receipt(file: &Path, mode: UninstallMode, done: &str) -> io::Result<()> {
    fs::write(file, receipt_line(mode, done) + "\n")
}

pub fn receipt_line(mode: UninstallMode, done: &str) -> String {
    format!("{RECEIPT_PREFIX} {mode}; {done}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_words_mean_to_leave_and_nothing_else_does() {
        let dir = tempfile::tempdir().unwrap();
        let (file, marker) = (dir.path().join("mode"), Marker::in_directory(dir.path()));
        let read = |file: &Path| read(file, &marker);
        assert_eq!(read(&file), Ok(None));
        assert_eq!(read(&file.join("below")), Ok(None));
        for (text, expected) in [
            ("", None),
            ("\n", None),
            ("uninstall\n", Some(UninstallMode::Uninstall)),
            ("handover", Some(UninstallMode::Handover)),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(read(&file), Ok(expected), "{text:?}");
        }
        for text in ["Uninstall", "uninstall now", "true", "uninstal"] {
            fs::write(&file, text).unwrap();
            let error = read(&file).unwrap_err();
            assert!(
                error.contains(text) && error.contains("handover"),
                "{error}"
            );
        }
        fs::write(&file, [0xff, 0xfe]).unwrap();
        assert!(read(&file).unwrap_err().contains("cannot read"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_file_says_is_followed_and_nonsense_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mode");
        let mut mode = watch(file.clone(), Marker::in_directory(dir.path()));
        assert_eq!(*mode.borrow_and_update(), None);
        fs::write(&file, "uninstall").unwrap();
        mode.changed().await.unwrap();
        assert_eq!(*mode.borrow_and_update(), Some(UninstallMode::Uninstall));
        fs::write(&file, "nonsense").unwrap();
        tokio::time::sleep(READ_INTERVAL * 3).await;
        assert_eq!(*mode.borrow_and_update(), Some(UninstallMode::Uninstall));
        fs::remove_file(&file).unwrap();
        mode.changed().await.unwrap();
        assert_eq!(*mode.borrow_and_update(), None);
    }

    #[test]
    fn a_node_that_was_left_stays_left_when_nobody_says_anything_and_is_back_when_the_word_is_empty()
     {
        let dir = tempfile::tempdir().unwrap();
        let (file, marker) = (dir.path().join("mode"), Marker::in_directory(dir.path()));
        marker.set(UninstallMode::Handover).unwrap();
        assert_eq!(read(&file, &marker), Ok(Some(UninstallMode::Handover)));
        fs::write(&file, "uninstall").unwrap();
        assert_eq!(read(&file, &marker), Ok(Some(UninstallMode::Uninstall)));
        fs::write(&file, "").unwrap();
        assert_eq!(read(&file, &marker), Ok(None));
        fs::remove_file(&file).unwrap();
        marker.clear().unwrap();
        assert_eq!(read(&file, &marker), Ok(None));
    }

    #[test]
    fn a_receipt_is_one_line_that_names_the_word() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("receipt");
        write_receipt(&file, UninstallMode::Uninstall, "12 pods withdrawn").unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(text, "inpod left: uninstall; 12 pods withdrawn\n");
    }

    #[test]
    fn a_marker_says_how_the_node_was_left_until_it_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let marker = Marker::in_directory(dir.path());
        assert!(!marker.is_set(UninstallMode::Uninstall));
        marker.set(UninstallMode::Uninstall).unwrap();
        assert!(marker.is_set(UninstallMode::Uninstall) && !marker.is_set(UninstallMode::Handover));
        marker.clear().unwrap();
        marker.clear().unwrap();
        assert!(!marker.is_set(UninstallMode::Uninstall));
    }
}
