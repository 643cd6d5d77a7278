//! Watches the CNI directories with inotify; an event only triggers a reconcile.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::INPOD_CNI;
use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

type Identity = (u64, u64);

/// An inotify watch of the directories, which may be replaced, removed and created at any time.
#[derive(Debug)]
pub(crate) struct Watcher {
    events: EventStream<[u8; 4096]>,
    watched: Vec<(PathBuf, Identity)>,
}

impl Watcher {
    /// Watches the directories that exist. A written file triggers an event when the writer closes the file.
    pub(crate) fn open(dirs: &[&Path]) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ATTRIB
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let mut watched = Vec::new();
        for dir in dirs {
            // The directory is identified before the watch is added: if the directory is replaced in between, the next
            // check sees the difference.
            let Ok(identity) = identity_of(dir) else {
                continue;
            };
            match inotify.watches().add(dir, mask) {
                Ok(_) => watched.push(((*dir).to_owned(), identity)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let events = inotify.into_event_stream([0; 4096])?;
        Ok(Self { events, watched })
    }

    /// Returns whether the watched directories are exactly the existing directories of `dirs`.
    pub(crate) fn is_watching(&self, dirs: &[&Path]) -> bool {
        let existing = dirs
            .iter()
            .filter_map(|dir| Some(((*dir).to_owned(), identity_of(dir).ok()?)));
        existing.eq(self.watched.iter().cloned())
    }

    pub(crate) async fn changed(&mut self) {
        loop {
            let Some(event) = self.events.next().await else {
                // The inotify stream never ends, so an end is not reported as a change.
                return std::future::pending().await;
            };
            if is_relevant(&event) {
                return;
            }
        }
    }

    /// Discards the pending events, whose changes the following read sees anyway.
    pub(crate) fn drain(&mut self) {
        while let Some(Some(_)) = self.events.next().now_or_never() {}
    }
}

/// Returns whether an event concerns inpod's plugin or a file that runtimes load.
fn is_relevant(event: &io::Result<EventOwned>) -> bool {
    let Ok(event) = event else { return true };
    let name = event.name.as_ref().map(|name| name.to_string_lossy());
    let is_file = !event.mask.contains(EventMask::ISDIR);
    name.is_none_or(|name| is_file && (name == INPOD_CNI || crate::is_loaded(&name)))
}

fn identity_of(path: &Path) -> io::Result<Identity> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}
