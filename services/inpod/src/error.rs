use std::{io, path::PathBuf};

use inpod_types::{Failure, Reason};

/// Why the program did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The service answered that it could not.
    #[error("{service} at {} answered: {failure}\n  What to do: {}", .socket.display(), .failure.reason.remedy())]
    Failed {
        service: &'static str,
        socket: PathBuf,
        failure: Box<Failure>,
    },
    /// The service did not answer.
    #[error("cannot reach {service} at {}: {cause}\n  What to do: check that {service} runs on this node, that you may open its socket (run as root), and that --run-dir is right.", .socket.display())]
    Unreachable {
        service: &'static str,
        socket: PathBuf,
        cause: String,
    },
    /// Something that is told is not as it should be.
    #[error("{0} is not ready")]
    NotReady(&'static str),
    /// An answer cannot be put into JSON: it is of another release's contract.
    #[error("cannot write the response as JSON: {0}")]
    Json(String),
    /// Standard output.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// Something is wrong with the node.
    #[error("failed checks: {0}; the report says what to do about each")]
    ChecksFailed(usize),
    /// Pods whose netns could not be looked into.
    #[error(
        "pods that could not be inspected: {0}; the cause and what to do are below the table, or in each failure"
    )]
    PodsUnreadable(usize),
    /// Enrollment changes who reaches a port.
    #[error("ports that enrollment changes: {0}")]
    PortsChange(usize),
    /// What was to be collected cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// Kubernetes does not do what it is asked.
    #[error("cannot {what}: {cause}")]
    Kubernetes { what: String, cause: String },
    /// What Services lead to is not known, or not whole. Everything else was told.
    #[error(
        "the ports of Services are missing: {0}\n  What to do: pass --kubeconfig FILE or set KUBECONFIG; you need the right to list endpointslices (discovery.k8s.io) and services, and pods where a Service has no EndpointSlice."
    )]
    ServicesUnknown(Box<Self>),
    /// Nodes that can be reached have not left in time.
    #[error("not done in time: {0}")]
    UninstallIncomplete(String),
    /// A manifest, or what it is to be injected with, cannot be used.
    #[error("{0}")]
    Manifest(String),
    /// The runtime.
    #[error("cannot start: {0}")]
    Runtime(io::Error),
}

impl CommandError {
    /// As `--help` says.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Kubernetes { .. } | Self::ServicesUnknown(_) => 3,
            Self::PortsChange(_) => 4,
            Self::Failed { .. }
            | Self::NotReady(_)
            | Self::PodsUnreadable(_)
            | Self::Json(_)
            | Self::Output(_)
            | Self::ChecksFailed(_)
            | Self::Write { .. }
            | Self::UninstallIncomplete(_)
            | Self::Manifest(_)
            | Self::Runtime(_) => 1,
        }
    }

    /// What went wrong, without what to do about it.
    pub(crate) fn first_line(&self) -> String {
        let text = self.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    }

    /// Whether a service answered that it could not: it is there.
    pub(crate) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }

    /// Whether a service answered that it takes no call from this process.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Failed { failure, .. } if failure.reason == Reason::CallerRefused)
    }
}
