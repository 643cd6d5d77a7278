//! Writes the parts of a bundle to a tar archive, within limits of time and size.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write as _},
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use tar::{Builder, Header};
use tokio::time::{Instant, timeout};

use crate::{error::CommandError, host_fs::Observed};

/// The limits of one part, and of all parts together.
const PART_TIMEOUT: Duration = Duration::from_secs(20);
const TOTAL_TIMEOUT: Duration = Duration::from_secs(120);

const MAX_TOTAL_BYTES: usize = 64 << 20;

/// The directory of all parts within the archive.
const TOP_DIRECTORY: &str = "inpod-bundle";

/// The path for standard output.
pub(super) const STDOUT: &str = "-";

/// An archive with mode 0600.
pub(super) struct Archive {
    path: PathBuf,
    tar: Builder<BufWriter<File>>,
    /// The time of all entries, in seconds since 1970.
    time: u64,
    deadline: Instant,
    left: usize,
    /// A description of each part, for the manifest.
    parts: Vec<Value>,
}

impl Archive {
    /// Creates the archive, and fails if the path already exists.
    pub(super) fn new(path: &Path) -> Result<Self, CommandError> {
        let file = create(path).map_err(|source| error(path, source))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Self {
            path: path.to_owned(),
            tar: Builder::new(BufWriter::new(file)),
            time: now.map_or(0, |time| time.as_secs()),
            deadline: Instant::now() + TOTAL_TIMEOUT,
            left: MAX_TOTAL_BYTES,
            parts: Vec::new(),
        })
    }

    /// Adds the part, or lists the part as missing if it does not arrive in time.
    pub(super) async fn add(
        &mut self,
        name: &str,
        part: impl Future<Output = Observed<String>>,
    ) -> Result<(), CommandError> {
        let until = self.deadline.min(Instant::now() + PART_TIMEOUT);
        let remaining = until.saturating_duration_since(Instant::now());
        let late = |_elapsed| Err(format!("not collected within {remaining:?}"));
        match timeout(remaining, part).await.unwrap_or_else(late) {
            Ok(text) => self.put(name, &text),
            Err(why) => {
                self.list_missing(name, &why);
                Ok(())
            }
        }
    }

    fn put(&mut self, name: &str, text: &str) -> Result<(), CommandError> {
        let bytes = text.len();
        if bytes > self.left {
            self.list_missing(name, &format!("no room left for its {bytes} bytes"));
            return Ok(());
        }
        self.left -= bytes;
        self.parts.push(json!({"name": name, "bytes": bytes}));
        self.append(name, text)
    }

    pub(super) fn list_missing(&mut self, name: &str, why: &str) {
        self.parts.push(json!({"name": name, "missing": why}));
    }

    fn append(&mut self, name: &str, text: &str) -> Result<(), CommandError> {
        let mut header = Header::new_gnu();
        header.set_size(text.len().try_into().unwrap_or(u64::MAX));
        header.set_mode(0o600);
        header.set_mtime(self.time);
        let path = Path::new(TOP_DIRECTORY).join(name);
        let appended = self.tar.append_data(&mut header, path, text.as_bytes());
        appended.map_err(|source| error(&self.path, source))
    }

    /// Writes the manifest and returns a summary of the bundle.
    pub(super) fn finish(mut self) -> Result<String, CommandError> {
        let is_missing = |part: &&Value| part.get("missing").is_some();
        let missing = self.parts.iter().filter(is_missing).count();
        let all = self.parts.len();
        let manifest = json!({"version": inpod_types::VERSION, "parts": self.parts});
        self.append("manifest.json", &format!("{manifest:#}\n"))?;
        let ended = self.tar.into_inner().and_then(|mut file| file.flush());
        ended.map_err(|source| error(&self.path, source))?;
        Ok(format!(
            "wrote {}: {all} parts, {missing} missing (manifest.json lists them with the reason)",
            self.path.display(),
        ))
    }
}

fn error(path: &Path, source: io::Error) -> CommandError {
    CommandError::Write {
        path: path.to_owned(),
        source,
    }
}

fn create(path: &Path) -> io::Result<File> {
    if path == Path::new(STDOUT) {
        return Ok(io::stdout().as_fd().try_clone_to_owned()?.into());
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}
