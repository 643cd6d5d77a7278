use std::{
    io,
    path::{Path, PathBuf},
};

use inpod_service::escape_controls;
use inpod_types::{Failure, Reason};

#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The service responded with a failure.
    #[error("{service} at {} answered: {}\n  What to do: {}", .socket.display(), escape_controls(&.failure.to_string()), .failure.reason.remedy())]
    Failed {
        service: &'static str,
        socket: PathBuf,
        failure: Box<Failure>,
    },
    /// The service did not respond at all.
    #[error("cannot reach {service} at {}: {}\n  What to do: check that {service} runs on this node, that you may open its socket (run as root), and that --run-dir is right.", .socket.display(), escape_controls(.cause))]
    Unreachable {
        service: &'static str,
        socket: PathBuf,
        cause: String,
    },
    #[error("{0} is not ready")]
    NotReady(&'static str),
    /// The response does not match the contract of this release.
    #[error("cannot write the response as JSON: {0}")]
    Json(String),
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// Holds the number of failed checks of `inpod doctor`.
    #[error("failed checks: {0}; the report says what to do about each")]
    ChecksFailed(usize),
    /// Holds the number of pods that could not be inspected.
    #[error(
        "pods that could not be inspected: {0}; the cause and what to do are below the table, or in each failure"
    )]
    PodsUnreadable(usize),
    /// Holds the number of ports for which enrollment changes who can reach the port.
    #[error("ports that enrollment changes: {0}")]
    PortsChange(usize),
    #[error("cannot write {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {}", escape_controls(.cause))]
    Kubernetes { what: String, cause: String },
    /// Kubernetes objects from a file cannot be used; all other facts were printed.
    #[error("{missing}: cannot use {}: {}\n  What to do: pass what kubectl get -o json prints with your rights.", display_input(.path), escape_controls(.cause))]
    Objects {
        missing: &'static str,
        path: PathBuf,
        cause: String,
    },
    /// Names the reachable nodes without a result in time.
    #[error("not done in time: {0}")]
    UninstallIncomplete(String),
    #[error("cannot start: {0}")]
    Runtime(io::Error),
}

fn display_input(path: &Path) -> String {
    if path == Path::new("-") {
        return "standard input".to_owned();
    }
    escape_controls(&path.display().to_string())
}

impl CommandError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Kubernetes { .. } | Self::Objects { .. } => 3,
            Self::PortsChange(_) => 4,
            Self::Failed { .. }
            | Self::NotReady(_)
            | Self::PodsUnreadable(_)
            | Self::Json(_)
            | Self::Output(_)
            | Self::ChecksFailed(_)
            | Self::Write { .. }
            | Self::UninstallIncomplete(_)
            | Self::Runtime(_) => 1,
        }
    }

    pub(crate) fn first_line(&self) -> String {
        let text = self.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    }

    pub(crate) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }

    /// Returns whether the service answered, but rejected this process as a caller.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Failed { failure, .. } if failure.reason == Reason::CallerRefused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_escape_control_characters_of_services() {
        let failure = Failure::new(Reason::Internal, "a\u{1b}[2J\nb");
        let failed = CommandError::Failed {
            service: "pod-events",
            socket: PathBuf::new(),
            failure: Box::new(failure),
        };
        let cause = "a\u{1b}[2J\nb".to_owned();
        let unreachable = CommandError::Unreachable {
            service: "pod-events",
            socket: PathBuf::new(),
            cause,
        };
        for error in [failed, unreachable] {
            assert!(error.first_line().contains("a\\u{1b}[2J\\nb"), "{error}");
        }
    }
}
