//! Writes the files of a bundle to an archive or a directory.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, BufWriter, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use super::tar;
use crate::error::CommandError;

/// The directory within the archive that contains all files.
const TOP_DIRECTORY: &str = "inpod-bundle";

/// The path that stands for standard output.
pub(super) const STDOUT: &str = "-";

/// The output, which only its owner can read.
#[derive(Debug)]
pub(super) struct Sink {
    path: PathBuf,
    time: u64,
    /// Unset if the output is a directory.
    archive: Option<BufWriter<File>>,
}

impl Sink {
    /// Creates the output, and fails if the path already exists.
    pub(super) fn new(path: &Path) -> Result<Self, CommandError> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let is_tar = path.extension().is_some_and(|extension| extension == "tar");
        let is_archive = is_tar || path == Path::new(STDOUT);
        let archive = if is_archive {
            Some(BufWriter::new(create(path).map_err(at(path))?))
        } else {
            None
        };
        if !is_archive {
            DirBuilder::new()
                .mode(0o700)
                .create(path)
                .map_err(at(path))?;
        }
        Ok(Self {
            path: path.to_owned(),
            time: time.map_or(0, |time| time.as_secs()),
            archive,
        })
    }

    /// Writes a file, whose name must not contain `..`.
    pub(super) fn put(&mut self, name: &str, content: &[u8]) -> Result<(), CommandError> {
        let path = self.path.join(name);
        let written = match &mut self.archive {
            Some(archive) => tar::file(
                archive,
                &format!("{TOP_DIRECTORY}/{name}"),
                content,
                self.time,
            ),
            None => write(&path, content),
        };
        written.map_err(at(&path))
    }

    /// Completes the output and returns its path.
    pub(super) fn finish(mut self) -> Result<PathBuf, CommandError> {
        if let Some(archive) = &mut self.archive {
            let ended = tar::end(archive).and_then(|()| archive.flush());
            ended.map_err(at(&self.path))?;
        }
        Ok(self.path)
    }
}

fn at(path: &Path) -> impl Fn(io::Error) -> CommandError {
    let path = path.to_owned();
    move |source| CommandError::Write {
        path: path.clone(),
        source,
    }
}

fn create(path: &Path) -> io::Result<File> {
    if path == Path::new(STDOUT) {
        return Ok(io::stdout().as_fd().try_clone_to_owned()?.into());
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    create(path)?.write_all(content)
}
