//! Logs the plugin's calls without an answer of pod-events, from files of the plugin.

use std::path::Path;

use inpod_cni::call_log::{CALL_LOG_DIR, Line, MAX_LINES};
use inpod_service::{read_bounded_nofollow, remove_if_exists};
use tracing::Level;

use super::spool::files;

/// A line has a few KiB at most.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The target of the lines, for `inpod log-level` and readers of the log.
const TARGET: &str = "inpod_cni";

/// Removes and logs all kept lines, oldest first. Continues after errors and returns the last error.
pub(super) fn forward(state_dir: &Path) -> Result<(), String> {
    let directory = state_dir.join(CALL_LOG_DIR);
    let failed = |path: &Path, error: &std::io::Error| format!("{}: {error}", path.display());
    let kept = files(&directory).map_err(|error| failed(&directory, &error))?;
    if kept.len() >= MAX_LINES {
        tracing::warn!(
            lines = kept.len(),
            "The plugin could keep no further lines; the container runtime's log has them"
        );
    }
    let mut result = Ok(());
    for path in kept {
        let read = read_bounded_nofollow(&path, MAX_LINE_BYTES).map_err(|error| error.to_string());
        // A line whose file stays would be logged again and again.
        if let Err(error) = remove_if_exists(&path) {
            result = Err(failed(&path, &error));
            continue;
        }
        let line = read.and_then(|bytes| {
            serde_json::from_slice::<Line>(&bytes).map_err(|error| error.to_string())
        });
        match line {
            Ok(line) => log(&line),
            Err(error) => {
                tracing::warn!(file = %path.display(), error, "Dropped a line of the plugin");
            }
        }
    }
    result
}

fn log(line: &Line) {
    // The level of an event is part of its code.
    macro_rules! event {
        ($level:expr) => {
            tracing::event!(
                target: TARGET,
                $level,
                outcome = line.message,
                verb = line.verb,
                sandbox = line.sandbox,
                pod = line.pod,
                code = line.code,
                error = line.error,
                trace_id = line.trace_id,
                time_unix_ms = line.time_unix_ms,
                took_ms = line.took_ms,
                "A call of the plugin"
            )
        };
    }
    match line.level.as_str() {
        "ERROR" => event!(Level::ERROR),
        "WARN" => event!(Level::WARN),
        "INFO" => event!(Level::INFO),
        _ => event!(Level::DEBUG),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_are_removed_whatever_they_hold_and_a_symlink_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join(CALL_LOG_DIR);
        assert_eq!(forward(dir.path()), Ok(()));
        fs::create_dir(&log).unwrap();
        let target = dir.path().join("kept");
        fs::write(&target, "{}").unwrap();
        fs::write(log.join("1.json"), "no line").unwrap();
        fs::write(log.join("2.json"), vec![b'x'; 1 << 20]).unwrap();
        std::os::unix::fs::symlink(&target, log.join("3.json")).unwrap();
        assert_eq!(forward(dir.path()), Ok(()));
        assert_eq!(fs::read_dir(&log).unwrap().count(), 0);
        assert!(target.exists());
        // What cannot be removed is named, and holds up no later line.
        fs::create_dir(log.join("1.json")).unwrap();
        fs::write(log.join("2.json"), "{}").unwrap();
        assert!(forward(dir.path()).unwrap_err().contains("1.json"));
        assert_eq!(fs::read_dir(&log).unwrap().count(), 1);
        fs::remove_dir_all(&log).unwrap();
        std::os::unix::fs::symlink(dir.path(), &log).unwrap();
        assert!(forward(dir.path()).unwrap_err().contains("symlink"));
    }
}
