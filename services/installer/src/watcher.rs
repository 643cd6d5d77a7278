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
#[derive(Debug, Default)]
pub(crate) struct Watcher {
    /// The events, unless the directories cannot be watched: then only the periodic reconcile finds changes.
    events: Option<EventStream<[u8; 4096]>>,
    watched: Vec<(PathBuf, Identity)>,
    /// The last attempt failed, which is logged once instead of at every reconcile.
    is_failing: bool,
}

impl Watcher {
    /// Watches the directories that exist, and discards the events so far, whose changes the following read sees anyway.
    pub(crate) fn watch(&mut self, dirs: [&Path; 2]) {
        // A directory is identified before its watch is added: if the directory is replaced in between, the next call
        // sees the difference.
        let identified = |dir: &Path| Some((dir.to_owned(), identity_of(dir).ok()?));
        let existing: Vec<_> = dirs.into_iter().filter_map(identified).collect();
        if self.events.is_none() || existing != self.watched {
            let opened = self.open(existing);
            if let Err(error) = &opened
                && !self.is_failing
            {
                tracing::warn!(%error, "Cannot watch the CNI directories");
            }
            self.is_failing = opened.is_err();
        }
        let Some(events) = &mut self.events else {
            return;
        };
        while let Some(Some(_)) = events.next().now_or_never() {}
    }

    /// A written file triggers an event when the writer closes the file.
    fn open(&mut self, dirs: Vec<(PathBuf, Identity)>) -> io::Result<()> {
        self.events = None;
        self.watched.clear();
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ATTRIB
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        for dir in dirs {
            match inotify.watches().add(&dir.0, mask) {
                Ok(_) => self.watched.push(dir),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        self.events = Some(inotify.into_event_stream([0; 4096])?);
        Ok(())
    }

    pub(crate) async fn changed(&mut self) {
        while let Some(events) = &mut self.events
            && let Some(event) = events.next().await
        {
            if is_relevant(&event) {
                return;
            }
        }
        // The inotify stream never ends, so an end is not reported as a change.
        std::future::pending::<()>().await;
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
