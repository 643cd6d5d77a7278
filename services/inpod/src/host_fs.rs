//! Accesses the node's files, also from a container: a debug pod has the node's root below `/host`.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs,
    io::ErrorKind,
    path::{Component, Path, PathBuf},
};

use inpod_service::read_bounded_any_fs;

/// The limit of the size of a file. The largest file to read is the kernel's symbol table.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// The number of links after which the kernel refuses a path (path_resolution(7)).
const MAX_SYMLINKS: usize = 40;

/// A fact, or the reason why the fact is missing.
pub(crate) type Observed<T> = Result<T, String>;

#[derive(Clone, Debug)]
pub(crate) struct HostFs(PathBuf);

impl HostFs {
    pub(crate) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Translates a path on the node to a path for this process. Links are resolved within the root, because `/var/run`
    /// is usually a link to `/run` and an absolute target would leave the root.
    pub(crate) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        if self.0 == Path::new("/") {
            return path.as_ref().to_owned();
        }
        let mut ahead = parts(path.as_ref());
        let mut way: Vec<OsString> = Vec::new();
        let mut links = 0;
        while let Some(part) = ahead.pop_front() {
            if part == ".." {
                way.pop();
                continue;
            }
            way.push(part);
            let Ok(target) = fs::read_link(self.joined(&way)) else {
                continue;
            };
            links += 1;
            if links > MAX_SYMLINKS {
                break;
            }
            way.pop();
            if target.is_absolute() {
                way.clear();
            }
            for part in parts(&target).into_iter().rev() {
                ahead.push_front(part);
            }
        }
        self.joined(&way)
    }

    fn joined(&self, way: &[OsString]) -> PathBuf {
        way.iter()
            .fold(self.0.clone(), |path, part| path.join(part))
    }

    /// Reads a file, and replaces bytes outside UTF-8.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Observed<String> {
        let path = path.as_ref();
        let read = read_bounded_any_fs(&self.at(path), MAX_FILE_BYTES);
        let bytes = read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads a file; returns `None` if the file does not exist.
    pub(crate) fn text_if_there(&self, path: impl AsRef<Path>) -> Observed<Option<String>> {
        match fs::symlink_metadata(self.at(path.as_ref())) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Ok(_) | Err(_) => self.text(path).map(Some),
        }
    }

    /// Returns the sorted names in a directory, or `None` if the directory does not exist.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> Observed<Option<Vec<String>>> {
        let path = path.as_ref();
        let entries = match fs::read_dir(self.at(path)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> = names.collect();
        names.sort();
        Ok(Some(names))
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_within_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostFs::new(dir.path());
        fs::create_dir_all(dir.path().join("run/netns")).unwrap();
        fs::create_dir(dir.path().join("var")).unwrap();
        symlink("/run", dir.path().join("var/run")).unwrap();
        symlink("../../../run", dir.path().join("var/up")).unwrap();
        for path in ["/run/netns", "/var/run/netns", "/var/up/netns"] {
            assert_eq!(root.at(path), dir.path().join("run/netns"), "{path}");
        }
        assert_eq!(root.at("/../etc"), dir.path().join("etc"));
        symlink("loop", dir.path().join("loop")).unwrap();
        assert!(root.at("/loop/x").starts_with(dir.path()));
    }

    #[test]
    fn what_is_not_there_is_no_error_where_that_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostFs::new(dir.path());
        assert_eq!(root.text_if_there("/x"), Ok(None));
        assert_eq!(root.names("/x"), Ok(None));
        assert!(root.text("/x").unwrap_err().contains("cannot read /x"));
        fs::write(dir.path().join("x"), "text").unwrap();
        assert_eq!(root.text_if_there("/x"), Ok(Some("text".to_owned())));
        assert!(root.names("/x").is_err());
    }
}
