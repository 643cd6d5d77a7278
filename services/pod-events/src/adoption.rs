//! Tracks the adoption of pods that ran before inpod: once per boot before the first desired set, and once per
//! process for pods that started meanwhile.

use std::{fs, path::PathBuf};

use inpod_cni::spool::boot_id;
use inpod_service::read_bounded_text;
use inpod_types::{Failure, Reason};
use tokio::sync::watch;

use crate::checkpoint::MAX_STATE_BYTES;

/// The state of the adoption, which a file beside the checkpoint carries over to later processes of the same boot.
#[derive(Debug)]
pub(crate) struct Adoption {
    file: PathBuf,
    completed: watch::Sender<bool>,
    pending: bool,
    /// Set until any process of this boot has adopted.
    first_of_boot: bool,
}

impl Adoption {
    pub(crate) fn open(file: PathBuf) -> Self {
        let known = read_bounded_text(&file, MAX_STATE_BYTES).is_ok_and(|boot| boot == boot_id());
        Self {
            file,
            completed: watch::Sender::new(false),
            pending: true,
            first_of_boot: !known,
        }
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Returns true until a process of this boot has adopted: the broker must not receive a desired set before.
    pub(crate) fn is_first_of_boot(&self) -> bool {
        self.first_of_boot
    }

    pub(crate) fn completed(&self) -> watch::Receiver<bool> {
        self.completed.subscribe()
    }

    /// Records adoption in the file.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn complete(&mut self) -> Result<(), Failure> {
        fs::write(&self.file, boot_id()).map_err(|error| {
            let message = format!("cannot write {}: {error}", self.file.display());
            Failure::new(Reason::CheckpointFailed, message)
        })?;
        (self.pending, self.first_of_boot) = (false, false);
        self.completed.send_replace(true);
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
        let mut first = Adoption::open(file.clone());
        assert!(first.is_pending() && first.is_first_of_boot());
        let completed = first.completed();
        assert!(!*completed.borrow());
        first.complete().unwrap();
        assert!(*completed.borrow());
        assert!(!first.is_pending() && !first.is_first_of_boot());
        let second = Adoption::open(file.clone());
        assert!(second.is_pending() && !second.is_first_of_boot());
        fs::write(&file, "another boot").unwrap();
        assert!(Adoption::open(file).is_first_of_boot());
    }

    #[test]
    fn what_cannot_be_written_down_is_not_known() {
        let mut adoption = Adoption::open("/nowhere/inherited".into());
        assert!(adoption.complete().is_err());
        assert!(adoption.is_first_of_boot());
    }
}
