//! Reads the files of a CNI directory in the way of the container runtimes.

use std::{fs, io::ErrorKind, path::Path};

use inpod_service::read_bounded;

use crate::{Conf, Conflist, Malformed, ReadError};

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
    pub loaded: Result<Loaded, Malformed>,
}

/// The content of a file as runtimes parse it.
#[derive(Clone, Debug)]
pub enum Loaded {
    List(Conflist),
    /// A `.conf` or `.json` file, and the list that runtimes make of it.
    Single(Conf, Conflist),
}

impl Loaded {
    pub fn list(&self) -> &Conflist {
        match self {
            Self::List(list) | Self::Single(_, list) => list,
        }
    }
}

impl NetworkFile {
    /// Reads a file, or what a symlink leads to, as runtimes do. Returns `None` if there is no regular file (any more).
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read. A file that is too large for runtimes is one without content.
    pub fn read(path: &Path, name: String) -> Result<Option<Self>, ReadError> {
        match read_bounded(path, MAX_BYTES) {
            Ok(content) => Ok(Some(Self::new(name, content))),
            Err(error) if error.kind() == ErrorKind::FileTooLarge => Ok(Some(Self {
                name,
                content: Vec::new(),
                loaded: Err(Malformed::TooLarge),
            })),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => {
                Ok(None)
            }
            Err(error) => Err(ReadError::of(path)(error)),
        }
    }

    /// Parses the content by the extension of the file, as runtimes do.
    pub fn new(name: String, content: Vec<u8>) -> Self {
        let loaded = parse_file(&name, &content);
        Self {
            name,
            content,
            loaded,
        }
    }

    /// Returns `None` if the file is invalid.
    pub fn list(&self) -> Option<&Conflist> {
        self.loaded.as_ref().ok().map(Loaded::list)
    }
}

impl Directory {
    /// Reads a directory. A missing directory has no files, and a file that vanishes meanwhile is skipped.
    pub fn read(dir: &Path) -> Result<Self, ReadError> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(ReadError::of(dir)(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(ReadError::of(dir))?;
            // Runtimes also load files whose names are not UTF-8, but inpod writes no such file.
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_loaded(&name) {
                files.extend(NetworkFile::read(&entry.path(), name)?);
            }
        }
        Ok(Self::of(files))
    }

    pub fn of(mut files: Vec<NetworkFile>) -> Self {
        files.sort_by(|one, other| one.name.cmp(&other.name));
        Self { files }
    }

    /// Returns the first valid file, from which runtimes take the network. CRI-O and old kubelets skip invalid files;
    /// [`Self::blocking_files`] describes containerd.
    pub fn first(&self) -> Option<(&NetworkFile, &Conflist)> {
        let mut lists = self.files.iter().map(|file| Some((file, file.list()?)));
        lists.find_map(|found| found)
    }

    /// Returns the invalid files before [`Self::first`], because of which containerd loads no network at all
    /// (containerd/go-cni, `loadFromConfDir`).
    pub fn blocking_files(&self) -> impl Iterator<Item = (&str, &Malformed)> {
        self.files.iter().map_while(|file| match &file.loaded {
            Ok(_) => None,
            Err(why) => Some((file.name.as_str(), why)),
        })
    }

    pub fn file(&self, name: &str) -> Option<&NetworkFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// Accepts `.conf`, `.conflist` and `.json` (containerd/go-cni `loadFromConfDir`, cri-o/ocicni `loadNetworks`).
pub fn is_loaded(name: &str) -> bool {
    let extension = name.rsplit_once('.').map(|(_, extension)| extension);
    matches!(extension, Some("conf" | "conflist" | "json"))
}

fn parse_file(name: &str, content: &[u8]) -> Result<Loaded, Malformed> {
    if name.ends_with(".conflist") {
        return Conflist::parse(content).map(Loaded::List);
    }
    let conf = Conf::parse(content)?;
    let list = conf.to_list()?;
    Ok(Loaded::Single(conf, list))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const LIST: &[u8] = br#"{"name":"n","plugins":[{"type":"bridge"}]}"#;

    fn file(name: &str, content: &[u8]) -> NetworkFile {
        NetworkFile::new(name.to_owned(), content.to_owned())
    }

    #[test]
    fn the_first_valid_file_by_name_decides_and_what_stands_before_it_is_named() {
        let directory = Directory::of(vec![
            file("20-b.conflist", LIST),
            file("10-a.conflist", LIST),
            file("05-broken.conf", LIST),
            file("00-empty.json", b""),
        ]);
        assert_eq!(directory.first().unwrap().0.name, "10-a.conflist");
        let names: Vec<_> = directory.blocking_files().map(|(name, _)| name).collect();
        assert_eq!(names, ["00-empty.json", "05-broken.conf"]);
    }

    #[test]
    fn only_names_that_runtimes_load_are_read_and_a_missing_directory_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "10-a.conflist",
            "a.json",
            "b.conf",
            "c.conflist.cilium_bak",
            ".conf",
            "d.tmp",
        ] {
            fs::write(dir.path().join(name), LIST).unwrap();
        }
        fs::create_dir(dir.path().join("dir.conf")).unwrap();
        let read = Directory::read(dir.path()).unwrap();
        let names: Vec<_> = read.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, [".conf", "10-a.conflist", "a.json", "b.conf"]);
        assert!(
            Directory::read(&dir.path().join("none"))
                .unwrap()
                .files
                .is_empty()
        );
    }

    #[test]
    fn a_file_is_found_by_its_name() {
        let directory = Directory::of(vec![file("10-a.conflist", LIST), file("20-b.conf", b"")]);
        let found = |name| directory.file(name).map(|file| file.content.as_slice());
        assert_eq!(found("10-a.conflist"), Some(LIST));
        assert_eq!(found("20-b.conf"), Some(&[][..]));
        assert_eq!(found("10-a.conf"), None);
    }

    #[test]
    fn what_vanished_is_left_out_and_what_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        symlink("vanished", dir.path().join("a.conf")).unwrap();
        assert_eq!(Directory::read(dir.path()).unwrap().files.len(), 0);
        symlink("loop.conf", dir.path().join("loop.conf")).unwrap();
        assert!(Directory::read(dir.path()).is_err());
        fs::write(dir.path().join("file"), LIST).unwrap();
        assert!(Directory::read(&dir.path().join("file")).is_err());
    }

    #[test]
    fn a_file_beyond_what_runtimes_read_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let padded = |size| {
            let mut content = LIST.to_vec();
            content.resize(usize::try_from(size).unwrap(), b' ');
            fs::write(dir.path().join("a.conflist"), content).unwrap();
            let file = Directory::read(dir.path()).unwrap().files.remove(0);
            file.loaded.map(drop)
        };
        assert_eq!(padded(MAX_BYTES), Ok(()));
        assert_eq!(padded(MAX_BYTES + 1), Err(Malformed::TooLarge));
    }
}
