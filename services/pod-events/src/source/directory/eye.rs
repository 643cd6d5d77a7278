//! The watch on a directory, which stays with the directory when another one takes its place at the path.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

/// Device and inode. They may be given to another directory as soon as this one is deleted, but the watch tells that.
type Identity = (u64, u64);

/// Sees what happens in the directory that stood at the path when it was opened.
#[derive(Debug)]
pub(super) struct Eye {
    events: EventStream<[u8; 4096]>,
    /// `None` when it may see nothing any more, or has missed something.
    on: Option<Identity>,
}

impl Eye {
    /// Whole files only: a file that is being written shows when it is closed. Kubernetes swaps the link `..data` of a
    /// mounted ConfigMap, which shows as moved.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Looked at before it is watched: one that is replaced in between is taken for another one at the next check,
        // never the other way round.
        let on = identity(path)?;
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ONLYDIR;
        inotify.watches().add(path, mask)?;
        Ok(Self {
            events: inotify.into_event_stream([0; 4096])?,
            on: Some(on),
        })
    }

    /// Waits until something has happened.
    pub(super) async fn changed(&mut self) {
        let Some(event) = self.events.next().await else {
            // There is no end of an inotify; if there were, it would be no change.
            return std::future::pending().await;
        };
        self.see(event);
    }

    /// Takes what has happened by now without waiting for more: a read that follows shows all of it.
    pub(super) fn skip(&mut self) {
        while let Some(Some(event)) = self.events.next().now_or_never() {
            self.see(event);
        }
    }

    fn see(&mut self, event: io::Result<EventOwned>) {
        let broken = EventMask::IGNORED | EventMask::UNMOUNT | EventMask::Q_OVERFLOW;
        if event.map_or(true, |event| event.mask.intersects(broken)) {
            self.close();
        }
    }

    /// Whether it sees what happens in the directory at a path.
    pub(super) fn is_on(&self, path: &Path) -> bool {
        self.on
            .is_some_and(|on| identity(path).is_ok_and(|found| found == on))
    }

    /// From now on it is on nothing, although it goes on telling what it sees.
    pub(super) fn close(&mut self) {
        self.on = None;
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}
