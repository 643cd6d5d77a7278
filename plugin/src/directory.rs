//! Accesses files in `stateDir`, where a process with fewer rights may write.
//!
//! The plugin runs as root of the host, and `pod-events` in a container. If an attacker controls `pod-events`, a symlink
//! below `stateDir` must not lead the plugin to other files of the host, and no FIFO, device or huge file may block a
//! call. The path of `stateDir` itself comes from the node's configuration and may contain symlinks.

use std::{
    fs::{DirBuilder, File},
    io::{self, ErrorKind, Read as _, Write as _},
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::Path,
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, renameat},
    sys::stat::{Mode, mkdirat},
    unistd::{UnlinkatFlags, unlinkat},
};

/// An open directory. Its files are opened relative to the descriptor, so that replacing the directory at the same path has
/// no effect.
#[derive(Debug)]
pub(crate) struct Directory(File);

impl Directory {
    /// Opens the directory at a trusted path, with symlinks followed.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let directory = open(path, flags, Mode::empty())?;
        Ok(Self(directory.into()))
    }

    /// Opens the directory at a trusted path, and first creates the directory and all missing parents with mode 0700.
    pub(crate) fn open_or_create(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Self::open(path)
    }

    /// Opens a subdirectory, and creates a missing subdirectory with mode 0700.
    pub(crate) fn open_or_create_subdirectory(&self, name: &str) -> io::Result<Self> {
        match mkdirat(&self.0, name, Mode::S_IRWXU) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        let directory = self.open_beneath(name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        Ok(Self(directory))
    }

    /// Reads a regular file of at most `limit` bytes.
    pub(crate) fn read_text(&self, name: &str, limit: u64) -> io::Result<String> {
        // With O_NONBLOCK, open(2) waits neither for the writer of a FIFO nor for the holder of a lease.
        let file = self.open_beneath(name, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
        if !file.metadata()?.is_file() {
            return Err(unsuitable("it is not a regular file; remove it"));
        }
        let mut bytes = Vec::new();
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        if u64::try_from(bytes.len()).is_ok_and(|length| length <= limit) {
            return String::from_utf8(bytes).map_err(unsuitable);
        }
        let problem = format!("it is larger than {limit} bytes; remove it");
        Err(io::Error::new(ErrorKind::FileTooLarge, problem))
    }

    /// Writes a file atomically and durably, through a temporary file whose name begins with a dot and must not exist
    /// yet.
    pub(crate) fn write_file(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let temporary = format!(".{name}");
        let renamed = self
            .write_synced(&temporary, content)
            .and_then(|()| Ok(renameat(&self.0, temporary.as_str(), &self.0, name)?));
        if renamed.is_err() {
            // The removal is best effort: readers skip leftovers, and the caller needs the first error.
            let _ignored = self.remove_file(&temporary);
        }
        renamed?;
        // Only an fsync of the directory makes the rename durable.
        self.0.sync_all()
    }

    pub(crate) fn remove_file(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir)?)
    }

    /// Returns whether the directory has at least `limit` entries. Entries beyond the limit are not read.
    pub(crate) fn has_entries(&self, limit: usize) -> io::Result<bool> {
        let mut dir = Dir::from_fd(self.0.try_clone()?.into())?;
        // The kernel returns `.` and `..` as entries, too.
        let limit = limit.saturating_add(2);
        let mut entries = dir.iter().take(limit);
        let count = entries.try_fold(0_usize, |count, entry| entry.map(|_| count + 1))?;
        Ok(count >= limit)
    }

    fn write_synced(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
        let mut file = self.open_beneath(name, flags)?;
        file.write_all(content)?;
        file.sync_all()
    }

    fn open_beneath(&self, name: &str, flags: OFlag) -> io::Result<File> {
        let mut how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        if flags.contains(OFlag::O_CREAT) {
            // openat2(2) refuses a mode without O_CREAT.
            how = how.mode(Mode::S_IRUSR | Mode::S_IWUSR);
        }
        let opened = openat2(self.0.as_fd(), name, how).map_err(describe_refusal)?;
        Ok(opened.into())
    }
}

/// Returns an error that names the object in place of a file or directory: the kernel's texts name no remedy.
fn describe_refusal(errno: Errno) -> io::Error {
    if errno == Errno::ELOOP {
        return unsuitable("it is a symlink; remove it");
    }
    if errno == Errno::ENOTDIR {
        return unsuitable("it is not a directory; remove it");
    }
    // open(2) refuses a socket with ENXIO.
    if errno == Errno::ENXIO {
        return unsuitable("it is not a regular file; remove it");
    }
    errno.into()
}

fn unsuitable(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, problem)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::{fs, os::unix::fs::symlink, os::unix::net::UnixListener};

    use nix::unistd::mkfifo;

    use super::*;

    /// An object that an attacker may put in place of a file or directory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Obstacle {
        LinkToDirectory,
        LinkToFile,
        LinkToLinkToDirectory,
        LinkToLinkToFile,
        LinkToDevZero,
        DanglingLink,
        Fifo,
        Socket,
        Directory,
        LargeFile,
    }

    impl Obstacle {
        pub(crate) const ALL: [Self; 10] = [
            Self::LinkToDirectory,
            Self::LinkToFile,
            Self::LinkToLinkToDirectory,
            Self::LinkToLinkToFile,
            Self::LinkToDevZero,
            Self::DanglingLink,
            Self::Fifo,
            Self::Socket,
            Self::Directory,
            Self::LargeFile,
        ];

        pub(crate) fn is_link(self) -> bool {
            !matches!(
                self,
                Self::Fifo | Self::Socket | Self::Directory | Self::LargeFile
            )
        }
    }

    /// A directory outside `stateDir`, the target of links.
    pub(crate) struct Foreign(tempfile::TempDir);

    impl Foreign {
        pub(crate) fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("directory")).unwrap();
            fs::write(dir.path().join("file"), "shop\n").unwrap();
            symlink("directory", dir.path().join("link-to-directory")).unwrap();
            symlink("file", dir.path().join("link-to-file")).unwrap();
            Self(dir)
        }

        pub(crate) fn put(&self, obstacle: Obstacle, path: &Path) {
            let link = |name: &str| symlink(self.0.path().join(name), path).unwrap();
            match obstacle {
                Obstacle::LinkToDirectory => link("directory"),
                Obstacle::LinkToFile => link("file"),
                Obstacle::LinkToLinkToDirectory => link("link-to-directory"),
                Obstacle::LinkToLinkToFile => link("link-to-file"),
                Obstacle::LinkToDevZero => symlink("/dev/zero", path).unwrap(),
                Obstacle::DanglingLink => link("missing"),
                Obstacle::Fifo => mkfifo(path, Mode::S_IRWXU).unwrap(),
                Obstacle::Socket => drop(UnixListener::bind(path).unwrap()),
                Obstacle::Directory => fs::create_dir(path).unwrap(),
                Obstacle::LargeFile => File::create(path).unwrap().set_len(1 << 30).unwrap(),
            }
        }

        pub(crate) fn assert_untouched(&self) {
            let names = |path: &Path| -> Vec<_> {
                let entries = fs::read_dir(path).unwrap();
                let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
                names.sort();
                names
            };
            let expected = ["directory", "file", "link-to-directory", "link-to-file"];
            assert_eq!(names(self.0.path()), expected);
            assert!(names(&self.0.path().join("directory")).is_empty());
            let text = fs::read_to_string(self.0.path().join("file")).unwrap();
            assert_eq!(text, "shop\n");
        }
    }
}
