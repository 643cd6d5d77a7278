//! A node that inpod leaves: what its processes are told of it, and how they tell that they are done.
//!
//! The word comes in a file that a ConfigMap is mounted as, so that nobody needs a right at the API server to hear it;
//! the receipt goes where the kubelet reads the last words of a container, so that nobody needs one to give it.

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

/// How often the file is read. A kubelet takes about a minute to bring a change of a ConfigMap.
const PERIOD: Duration = Duration::from_secs(1);

/// With what a receipt begins.
pub const RECEIPT: &str = "inpod left:";

/// What is to become of inpod on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leave {
    /// It stays.
    #[default]
    No,
    /// Everything that it did is undone.
    Uninstall,
    /// Everything that it did stays for another agent.
    Handover,
}

impl Leave {
    /// Understands the word; `None`: it is none.
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "" => Some(Self::No),
            "uninstall" => Some(Self::Uninstall),
            "handover" => Some(Self::Handover),
            _ => None,
        }
    }

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::No => "",
            Self::Uninstall => "uninstall",
            Self::Handover => "handover",
        }
    }
}

impl fmt::Display for Leave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a file says. A missing one says nothing.
///
/// # Errors
///
/// When it cannot be read, or what it says is no word.
pub fn read(file: &Path) -> Result<Leave, String> {
    let shown = file.display();
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Leave::No);
        }
        Err(error) => return Err(format!("cannot read {shown}: {error}")),
    };
    Leave::parse(&text).ok_or_else(|| {
        let said: String = text.trim().chars().take(40).collect();
        format!("{shown} says {said:?}; it may say uninstall or handover, or nothing")
    })
}

/// Follows what a file says. Where it cannot be understood, what it said before goes on: nobody leaves by mistake.
pub fn follow(file: PathBuf) -> watch::Receiver<Leave> {
    let first = read(&file).unwrap_or_default();
    let (sender, receiver) = watch::channel(first);
    tokio::spawn(async move {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut problem = None;
        while !sender.is_closed() {
            ticks.tick().await;
            let said = read(&file);
            if said.as_ref().err() != problem.as_ref()
                && let Err(error) = &said
            {
                tracing::error!(error, "Not left: what is wanted of this node is not known");
            }
            if let Ok(now) = said {
                sender.send_if_modified(|was| std::mem::replace(was, now) != now);
            }
            problem = said.err();
        }
    });
    receiver
}

/// Says that this process has done its part, in one line.
///
/// # Errors
///
/// When the file cannot be written.
pub fn receipt(file: &Path, leave: Leave, done: &str) -> io::Result<()> {
    fs::write(file, format!("{RECEIPT} {leave}; {done}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_words_mean_to_leave_and_nothing_else_does() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mode");
        assert_eq!(read(&file), Ok(Leave::No));
        assert_eq!(read(&file.join("below")), Ok(Leave::No));
        for (text, expected) in [
            ("", Leave::No),
            ("\n", Leave::No),
            ("uninstall\n", Leave::Uninstall),
            ("handover", Leave::Handover),
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
        let mut said = follow(file.clone());
        assert_eq!(*said.borrow_and_update(), Leave::No);
        fs::write(&file, "uninstall").unwrap();
        said.changed().await.unwrap();
        assert_eq!(*said.borrow_and_update(), Leave::Uninstall);
        fs::write(&file, "nonsense").unwrap();
        tokio::time::sleep(PERIOD * 3).await;
        assert_eq!(*said.borrow_and_update(), Leave::Uninstall);
        fs::remove_file(&file).unwrap();
        said.changed().await.unwrap();
        assert_eq!(*said.borrow_and_update(), Leave::No);
    }

    #[test]
    fn a_receipt_is_one_line_that_names_the_word() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("receipt");
        receipt(&file, Leave::Uninstall, "12 pods withdrawn").unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(text, "inpod left: uninstall; 12 pods withdrawn\n");
    }
}
