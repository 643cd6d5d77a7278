//! Detects by inotify(7), with a watch on the directory, that the path of a claimed netns is gone.
//!
//! procfs has no such events (inotify(7), "pseudo-filesystems"); the periodic sweep finds processes that ended.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use futures_util::StreamExt as _;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};
use nix::sys::statfs::{PROC_SUPER_MAGIC, statfs};

#[derive(Debug)]
pub(super) struct PathWatcher {
    events: EventStream<[u8; 4096]>,
    /// Watched directories by watch descriptor. Several paths may lead to one directory, such as `/run/netns` and
    /// `/var/run/netns`. The map stays small, as runtimes keep all netns in one or two directories.
    watched: BTreeMap<i32, Vec<PathBuf>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PathEvent {
    /// The file is gone, or its path leads to another file. Lists the file under every watched path of its
    /// directory.
    Removed(Vec<PathBuf>),
    /// A directory is gone, or the kernel dropped events.
    Lost,
    Irrelevant,
}

impl PathWatcher {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            events: Inotify::init()?.into_event_stream([0; 4096])?,
            watched: BTreeMap::new(),
        })
    }

    /// Watches the path's directory, unless the directory is already watched.
    pub(super) fn watch(&mut self, name: &Path) -> io::Result<()> {
        let Some(directory) = name.parent() else {
            return Ok(());
        };
        let is_known = |known: &Vec<PathBuf>| known.iter().any(|known| known == directory);
        if self.watched.values().any(is_known)
            || statfs(directory)?.filesystem_type() == PROC_SUPER_MAGIC
        {
            return Ok(());
        }
        // A mount onto the path causes no event, but an unmount is followed by one of the events in this mask.
        let mask =
            WatchMask::DELETE | WatchMask::MOVED_FROM | WatchMask::MOVED_TO | WatchMask::ONLYDIR;
        let watch = self.events.watches().add(directory, mask)?;
        let path_watcher = self.watched.entry(watch.get_watch_descriptor_id());
        path_watcher.or_default().push(directory.to_owned());
        Ok(())
    }

    /// Waits for the next event, and is cancel safe.
    pub(super) async fn next(&mut self) -> io::Result<PathEvent> {
        match self.events.next().await {
            Some(event) => Ok(self.path_event(&event?)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn path_event(&mut self, event: &EventOwned) -> PathEvent {
        let watch = event.wd.get_watch_descriptor_id();
        if event.mask.contains(EventMask::IGNORED) {
            self.watched.remove(&watch);
        }
        match (&event.name, self.watched.get(&watch)) {
            (Some(name), Some(directories)) => {
                let names = directories.iter().map(|directory| directory.join(name));
                PathEvent::Removed(names.collect())
            }
            _ => PathEvent::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use tokio::time::timeout;

    use super::*;

    async fn next(path_watcher: &mut PathWatcher) -> PathEvent {
        let seen = timeout(Duration::from_secs(20), path_watcher.next()).await;
        seen.unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_name_that_goes_is_seen_under_every_path_that_was_watched() {
        let place = tempfile::tempdir().unwrap();
        let (real, link) = (place.path().join("real"), place.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        for name in ["a", "b"] {
            fs::write(real.join(name), "").unwrap();
        }
        let mut path_watcher = PathWatcher::open().unwrap();
        for name in [real.join("a"), link.join("b"), real.join("b")] {
            path_watcher.watch(&name).unwrap();
        }
        let both = |name: &str| PathEvent::Removed(vec![real.join(name), link.join(name)]);
        fs::remove_file(real.join("a")).unwrap();
        assert_eq!(next(&mut path_watcher).await, both("a"));
        fs::rename(real.join("b"), place.path().join("b")).unwrap();
        assert_eq!(next(&mut path_watcher).await, both("b"));
        fs::rename(place.path().join("b"), real.join("c")).unwrap();
        assert_eq!(next(&mut path_watcher).await, both("c"));
    }

    #[tokio::test]
    async fn a_directory_that_is_gone_is_told_and_watched_anew() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("netns");
        let name = directory.join("a");
        let mut path_watcher = PathWatcher::open().unwrap();
        for _ in 0..2 {
            fs::create_dir(&directory).unwrap();
            fs::write(&name, "").unwrap();
            path_watcher.watch(&name).unwrap();
            fs::remove_dir_all(&directory).unwrap();
            assert_eq!(
                next(&mut path_watcher).await,
                PathEvent::Removed(vec![name.clone()])
            );
            assert_eq!(next(&mut path_watcher).await, PathEvent::Lost);
        }
    }

    #[tokio::test]
    async fn procfs_is_not_watched_and_a_directory_that_is_not_there_is_an_error() {
        let mut path_watcher = PathWatcher::open().unwrap();
        path_watcher.watch(Path::new("/proc/self/ns/net")).unwrap();
        assert!(path_watcher.watched.is_empty());
        assert!(path_watcher.watch(Path::new("/does/not/exist")).is_err());
    }
}
