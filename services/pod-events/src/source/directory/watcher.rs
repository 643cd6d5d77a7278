//! An inotify watch, which stays with its directory when another directory takes the path.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

/// Device and inode. Both may be reused after a deletion, which the watch reports.
type Identity = (u64, u64);

#[derive(Debug)]
pub(super) struct Watcher {
    events: EventStream<[u8; 4096]>,
    /// `None` if the watch has ended or missed events.
    target: Option<Identity>,
}

impl Watcher {
    /// Watches for complete files only: a file is reported on close. Kubernetes swaps the link `..data` of a mounted
    /// ConfigMap, and the swap is reported as a move.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // The identity is read before the watch starts: a directory replaced in between differs at the next check,
        // while the reverse order would miss the replacement.
        let target = identity(path)?;
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ONLYDIR;
        inotify.watches().add(path, mask)?;
        Ok(Self {
            events: inotify.into_event_stream([0; 4096])?,
            target: Some(target),
        })
    }

    pub(super) async fn changed(&mut self) {
        let Some(event) = self.events.next().await else {
            // An inotify stream does not end, and an end would be no event.
            return std::future::pending().await;
        };
        self.check(event);
    }

    /// Discards pending events, which the next read covers.
    pub(super) fn discard_pending(&mut self) {
        while let Some(Some(event)) = self.events.next().now_or_never() {
            self.check(event);
        }
    }

    fn check(&mut self, event: io::Result<EventOwned>) {
        let broken = EventMask::IGNORED | EventMask::UNMOUNT | EventMask::Q_OVERFLOW;
        if event.map_or(true, |event| event.mask.intersects(broken)) {
            self.close();
        }
    }

    pub(super) fn is_watching(&self, path: &Path) -> bool {
        self.target
            .is_some_and(|target| identity(path).is_ok_and(|found| found == target))
    }

    /// Marks the watch as unreliable, although events continue to arrive.
    pub(super) fn close(&mut self) {
        self.target = None;
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}
