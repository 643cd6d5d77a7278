//! Reads the files of a CNI directory in the way of the container runtimes.

use std::{
    fs::{self, DirEntry, File},
    io::{self, ErrorKind},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use inpod_service::read_bounded;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use crate::{Conflist, Malformed, ReadError};

/// The largest file that containerd/go-cni reads (`MaxFileSize`).
pub(crate) const MAX_BYTES: u64 = 2 << 20;

/// The files that runtimes load from a directory, in the order of loading.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    pub files: Vec<NetworkFile>,
}

#[derive(Clone, Debug)]
pub struct NetworkFile {
    pub name: String,
    pub content: Vec<u8>,
    pub is_link: bool,
    /// True if the content is that of a regular file, and not of a link or of a file that cannot be read.
    pub is_regular: bool,
    /// The permissions of the file, if it exists.
    pub mode: Option<u32>,
    /// The content as runtimes parse it.
    pub loaded: Result<Conflist, Malformed>,
}

impl NetworkFile {
    /// Parses the content by the extension of the file, as runtimes do.
    pub fn new(name: String, content: Vec<u8>) -> Self {
        let loaded = if name.ends_with(".conflist") {
            Conflist::parse(&content)
        } else {
            Conflist::parse_single(&content)
        };
        Self {
            name,
            content,
            is_link: false,
            is_regular: true,
            mode: None,
            loaded,
        }
    }

    /// Returns `None` if the file is invalid.
    pub fn list(&self) -> Option<&Conflist> {
        self.loaded.as_ref().ok()
    }

    /// Returns whether the network is made by a meta plugin.
    pub(crate) fn is_meta(&self) -> bool {
        self.list().is_some_and(|list| list.meta().is_some())
    }

    /// Reads the file of an entry, whose path on the host is `path`. Returns `None` if the file has vanished.
    fn read(root: &Path, path: &Path, entry: &DirEntry) -> Option<Self> {
        let link = fs::read_link(entry.path()).ok();
        let name = entry.file_name();
        let (content, problem) =
            match resolve(root, path).and_then(|it| read_bounded(&it, MAX_BYTES)) {
                // inpod writes no file of such a name, and so cannot follow the file either.
                Ok(_) if name.to_str().is_none() => (Vec::new(), Some(Malformed::Name)),
                Ok(content) => (content, None),
                Err(error) => {
                    let problem = match (error.kind(), &link) {
                        (ErrorKind::NotFound, None) => return None,
                        (ErrorKind::NotFound, Some(target)) => Malformed::Dangling(target.clone()),
                        (ErrorKind::FileTooLarge, _) => Malformed::TooLarge,
                        (ErrorKind::InvalidData | ErrorKind::IsADirectory, _) => Malformed::NoFile,
                        _ => Malformed::Unreadable(error.to_string()),
                    };
                    (Vec::new(), Some(problem))
                }
            };
        let mut file = Self::new(name.to_string_lossy().into_owned(), content);
        file.is_regular = link.is_none() && problem.is_none();
        file.is_link = link.is_some();
        let found = fs::metadata(entry.path()).ok();
        file.mode = found.map(|found| found.mode() & 0o7777);
        file.loaded = problem.map_or(file.loaded, Err);
        Some(file)
    }
}

impl Directory {
    /// Reads a directory of the host, whose file system is at `root`. A missing directory has no files.
    pub fn read(root: &Path, dir: &Path) -> Result<Self, ReadError> {
        let entries = match resolve(root, dir).and_then(fs::read_dir) {
            Ok(entries) => entries,
            Err(error) if is_missing(&error) => return Ok(Self::default()),
            Err(error) => return Err(ReadError::of(dir)(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(ReadError::of(dir))?;
            let name = entry.file_name();
            // Runtimes skip directories, but not links to directories.
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_loaded(&name.to_string_lossy()) && !is_dir {
                files.extend(NetworkFile::read(root, &dir.join(name), &entry));
            }
        }
        Ok(Self::of(files))
    }

    pub fn of(mut files: Vec<NetworkFile>) -> Self {
        files.sort_by(|one, other| one.name.cmp(&other.name));
        Self { files }
    }

    pub fn file(&self, name: &str) -> Option<&NetworkFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// Returns whether there is no directory.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Returns the sorted names of a directory's entries; a directory that cannot be read has none.
pub(crate) fn file_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Accepts `.conf`, `.conflist` and `.json` (containerd/go-cni `loadFromConfDir`, cri-o/ocicni `loadNetworks`).
pub fn is_loaded(name: &str) -> bool {
    let extension = name.rsplit_once('.').map(|(_, extension)| extension);
    matches!(extension, Some("conf" | "conflist" | "json"))
}

/// Returns where a path of the host is in this mount namespace. Absolute links of the host lead below `root`, too.
///
/// # Errors
///
/// Fails if the path does not exist.
pub(crate) fn resolve(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT);
    let found = openat2(File::open(root)?, path, how)?;
    fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Returns the path in this mount namespace without following links.
pub(crate) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::OsStr,
        os::unix::{ffi::OsStrExt as _, fs::symlink},
    };

    use super::*;

    const LIST: &[u8] = br#"{"name":"n","plugins":[{"type":"bridge"}]}"#;

    fn read(root: &Path) -> Vec<NetworkFile> {
        Directory::read(root, Path::new("/net.d")).unwrap().files
    }

    #[test]
    fn only_files_that_runtimes_load_are_read_in_order() {
        let root = tempfile::tempdir().unwrap();
        assert!(read(root.path()).is_empty());
        let dir = root.path().join("net.d");
        fs::create_dir(&dir).unwrap();
        for name in [
            "b.conf",
            "a.json",
            "10-a.conflist",
            "c.conflist.cilium_bak",
            ".conf",
            "d.tmp",
        ] {
            fs::write(dir.join(name), LIST).unwrap();
        }
        fs::create_dir(dir.join("dir.conf")).unwrap();
        let files = read(root.path());
        let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, [".conf", "10-a.conflist", "a.json", "b.conf"]);
        let file = root.path().join("file");
        fs::write(&file, LIST).unwrap();
        let read = Directory::read(root.path(), Path::new("/file")).unwrap();
        assert!(read.files.is_empty());
    }

    #[test]
    fn links_lead_below_the_hosts_root_and_a_link_to_nothing_is_named() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        fs::create_dir(&store).unwrap();
        fs::write(store.join("cni.json"), LIST).unwrap();
        symlink("/store", root.path().join("net.d")).unwrap();
        symlink("/store/cni.json", store.join("10-a.conflist")).unwrap();
        symlink("cni.json", store.join("20-b.conflist")).unwrap();
        symlink("/gone", store.join("30-c.conflist")).unwrap();
        symlink("/store", store.join("40-d.conf")).unwrap();
        let files = read(root.path());
        let file = |name: &str| files.iter().find(|file| file.name == name).unwrap();
        for name in ["10-a.conflist", "20-b.conflist"] {
            assert!(file(name).is_link && file(name).content == LIST, "{name}");
        }
        assert!(!file("cni.json").is_link);
        let why = |name: &str| file(name).loaded.as_ref().unwrap_err();
        assert_eq!(*why("30-c.conflist"), Malformed::Dangling("/gone".into()));
        assert_eq!(*why("40-d.conf"), Malformed::NoFile);
        symlink("50-e.conf", store.join("50-e.conf")).unwrap();
        fs::write(store.join(OsStr::from_bytes(b"60-\xff.conflist")), LIST).unwrap();
        let files = read(root.path());
        let file = |name: &str| files.iter().find(|file| file.name == name).unwrap();
        let why = |name: &str| file(name).loaded.as_ref().unwrap_err();
        assert!(matches!(why("50-e.conf"), Malformed::Unreadable(_)));
        assert_eq!(*why("60-\u{fffd}.conflist"), Malformed::Name);
    }

    #[test]
    fn a_file_beyond_what_runtimes_read_is_invalid() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("net.d")).unwrap();
        let padded = |size| {
            let mut content = LIST.to_vec();
            content.resize(usize::try_from(size).unwrap(), b' ');
            fs::write(root.path().join("net.d/a.conflist"), content).unwrap();
            read(root.path()).remove(0).loaded.map(drop)
        };
        assert_eq!(padded(MAX_BYTES), Ok(()));
        assert_eq!(padded(MAX_BYTES + 1), Err(Malformed::TooLarge));
    }
}
