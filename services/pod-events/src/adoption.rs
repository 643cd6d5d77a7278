//! Whether the pods that ran before inpod have been written down: once per boot before the first set, and once per run
//! for what ran meanwhile.

use std::{fs, path::PathBuf};

use inpod_cni::spool::boot_id;
use inpod_types::{Failure, Reason};
use tokio::sync::watch;

/// A file beside the checkpoint tells the later runs of a boot.
#[derive(Debug)]
pub(crate) struct Inheritance {
    file: PathBuf,
    closed: watch::Sender<bool>,
    /// Whether this run is still to look.
    open: bool,
    /// Whether no run of this boot ever looked.
    unknown: bool,
}

impl Inheritance {
    /// What earlier runs of this boot left in the file.
    pub(crate) fn open(file: PathBuf) -> Self {
        let known = fs::read_to_string(&file).is_ok_and(|boot| boot == boot_id());
        Self {
            file,
            closed: watch::Sender::new(false),
            open: true,
            unknown: !known,
        }
    }

    /// Whether this run is still to look.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Whether no run of this boot ever looked: nobody may be told a set.
    pub(crate) fn is_unknown(&self) -> bool {
        self.unknown
    }

    /// Follows whether this run has looked.
    pub(crate) fn closed(&self) -> watch::Receiver<bool> {
        self.closed.subscribe()
    }

    /// Everything of before is in the checkpoint.
    ///
    /// # Errors
    ///
    /// When that cannot be written down.
    pub(crate) fn close(&mut self) -> Result<(), Failure> {
        fs::write(&self.file, boot_id()).map_err(|error| {
            let message = format!("cannot write {}: {error}", self.file.display());
            Failure::new(Reason::CheckpointFailed, message)
        })?;
        (self.open, self.unknown) = (false, false);
        self.closed.send_replace(true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_run_of_a_boot_has_seen_the_next_one_need_not_wait_for() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("inherited");
        let mut first = Inheritance::open(file.clone());
        assert!(first.is_open() && first.is_unknown());
        let closed = first.closed();
        assert!(!*closed.borrow());
        first.close().unwrap();
        assert!(*closed.borrow());
        assert!(!first.is_open() && !first.is_unknown());
        let second = Inheritance::open(file.clone());
        assert!(second.is_open() && !second.is_unknown());
        fs::write(&file, "another boot").unwrap();
        assert!(Inheritance::open(file).is_unknown());
    }

    #[test]
    fn what_cannot_be_written_down_is_not_known() {
        let mut inheritance = Inheritance::open("/nowhere/inherited".into());
        assert!(inheritance.close().is_err());
        assert!(inheritance.is_unknown());
    }
}
