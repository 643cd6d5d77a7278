//! Installs the plugin: writes a temporary file, tests the file as a plugin, and renames the file.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::INPOD_CNI;
use inpod_service::read_bounded;

use crate::{error::BinaryError, files};

const TRIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The identities of the source and the installed plugin. While both are unchanged, the contents need not be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamps([(u64, u64, u64, (i64, i64)); 2]);

impl FileStamps {
    /// Reads the stamps; returns `None` if one of the files is missing.
    pub fn of(source: &Path, dir: &Path) -> Option<Self> {
        let one = |path: &Path| {
            let found = fs::metadata(path).ok()?;
            // Any change to a file changes its ctime, so the content need not be read.
            let changed = (found.ctime(), found.ctime_nsec());
            Some((found.dev(), found.ino(), found.size(), changed))
        };
        Some(Self([one(source)?, one(&dir.join(INPOD_CNI))?]))
    }
}

/// Returns whether the installed plugin has the content of the source and the right mode.
///
/// # Errors
///
/// Fails if the source or the directory is missing.
pub fn is_current(source: &Path, dir: &Path) -> Result<bool, BinaryError> {
    let wanted = read(source)?;
    if !dir.is_dir() {
        return Err(BinaryError::NoDirectory(dir.to_owned()));
    }
    let target = dir.join(INPOD_CNI);
    let is_executable =
        fs::metadata(&target).is_ok_and(|found| found.permissions().mode() & 0o111 == 0o111);
    let size = u64::try_from(wanted.len()).unwrap_or(u64::MAX);
    Ok(is_executable && read_bounded(&target, size).is_ok_and(|found| found == wanted))
}

/// Installs the plugin.
///
/// # Errors
///
/// The previous file stays in place after an error.
pub fn install(source: &Path, dir: &Path) -> Result<(), BinaryError> {
    let content = read(source)?;
    let failed = |source: io::Error| {
        if source.kind() == io::ErrorKind::ReadOnlyFilesystem {
            return BinaryError::ReadOnly(dir.to_owned());
        }
        let path = dir.join(INPOD_CNI);
        BinaryError::Write { path, source }
    };
    files::remove_temporaries(dir).map_err(failed)?;
    let make_executable = |file: &fs::File| files::set_mode(file, 0o755);
    let temporary = files::write_temporary(dir, INPOD_CNI, &content, make_executable);
    let temporary = temporary.map_err(failed)?;
    ask_versions(&temporary).map_err(|problem| BinaryError::Unusable {
        dir: dir.to_owned(),
        problem,
    })?;
    files::rename(temporary, dir, INPOD_CNI).map_err(failed)
}

fn read(source: &Path) -> Result<Vec<u8>, BinaryError> {
    fs::read(source).map_err(|error| BinaryError::Source {
        path: source.to_owned(),
        source: error,
    })
}

/// Asks a plugin for the versions of the CNI spec that it speaks, with the command VERSION.
///
/// # Errors
///
/// Fails if the file cannot be executed, or does not answer like a plugin.
pub(crate) fn ask_versions(plugin: &Path) -> Result<Vec<String>, String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Report {
        supported_versions: Vec<String>,
    }
    let deadline = Instant::now() + TRIAL_TIMEOUT;
    let mut child = spawn(plugin, deadline)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A failed write is no error, because a plugin may answer without reading stdin.
        drop(stdin.write_all(br#"{"cniVersion":"1.1.0"}"#));
    }
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() >= deadline => {
                // The kill is a best effort, because the result is an error in any case.
                drop(child.kill());
                drop(child.wait());
                return Err(format!(
                    "it did not answer VERSION within {TRIAL_TIMEOUT:?}"
                ));
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut output = String::new();
    let read = child
        .stdout
        .take()
        .map(|stdout| stdout.take(4096).read_to_string(&mut output));
    if !status.success() {
        return Err(format!("VERSION ended with {status}"));
    }
    let report = read.and_then(|_| serde_json::from_str::<Report>(&output).ok());
    report
        .map(|report| report.supported_versions)
        .ok_or_else(|| format!("it answered VERSION with {output:?}"))
}

/// Starts the plugin, and retries after ETXTBSY: a fork in another thread may briefly hold the file open for writing.
fn spawn(plugin: &Path, deadline: Instant) -> Result<Child, String> {
    loop {
        let mut command = Command::new(plugin);
        command.env_clear().env("CNI_COMMAND", "VERSION");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        match command.spawn() {
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(2));
            }
            other => return other.map_err(|error| format!("it cannot be executed: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const GOOD: &str =
        "#!/bin/sh\n[ \"$CNI_COMMAND\" = VERSION ] && echo '{\"supportedVersions\":[\"1.0.0\"]}'\n";

    fn source(dir: &Path, text: &str) -> PathBuf {
        let path = dir.join("source");
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn a_plugin_that_answers_is_put_there_once_and_one_that_does_not_never_is() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = source(from.path(), GOOD);
        fs::write(
            to.path().join(".inpod-cni.inpod.tmp"),
            "left by a killed copy",
        )
        .unwrap();
        assert!(!is_current(&path, to.path()).unwrap());
        install(&path, to.path()).unwrap();
        assert!(is_current(&path, to.path()).unwrap());
        for bad in [
            "#!/bin/sh\nexit 1\n",
            "#!/bin/sh\necho no\n",
            "no program",
            "#!/bin/sh\nexec sleep 60\n",
        ] {
            let error = install(&source(from.path(), bad), to.path()).unwrap_err();
            assert!(matches!(error, BinaryError::Unusable { .. }), "{error}");
        }
        assert_eq!(fs::read_to_string(to.path().join(INPOD_CNI)).unwrap(), GOOD);
        let mode = fs::metadata(to.path().join(INPOD_CNI))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755);
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_directory_and_a_missing_source_are_different_errors() {
        let dir = tempfile::tempdir().unwrap();
        let error = is_current(&source(dir.path(), GOOD), &dir.path().join("none")).unwrap_err();
        assert!(matches!(error, BinaryError::NoDirectory(_)), "{error}");
        let error = is_current(&dir.path().join("none"), dir.path()).unwrap_err();
        assert!(matches!(error, BinaryError::Source { .. }), "{error}");
    }
}
