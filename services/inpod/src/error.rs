use std::{io, path::PathBuf};

use inpod_types::{Failure, Reason};

/// Why the program did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// The service answered that it could not.
    #[error("{service} at {} answered: {failure}\n  What to do: {}", .socket.display(), .failure.reason.remedy())]
    Failed {
        service: &'static str,
        socket: PathBuf,
        failure: Box<Failure>,
    },
    /// The service did not answer.
    #[error("cannot reach {service} at {}: {cause}\n  What to do: check that {service} runs on this node and that this user may open its socket (--run-dir says where sockets are).", .socket.display())]
    Unreachable {
        service: &'static str,
        socket: PathBuf,
        cause: String,
    },
    /// Something that is told is not as it should be.
    #[error("{0} is not ready")]
    NotReady(&'static str),
    /// An answer cannot be put into JSON: it is of another release's contract.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(String),
    /// Standard output.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// Something is wrong with the node.
    #[error("{0} of the checks failed; what to do stands below each")]
    Unwell(usize),
    /// Pods whose netns could not be looked into.
    #[error(
        "{0} of the pods could not be looked into; what to do stands below the table, or in each one's failure"
    )]
    Unseen(usize),
    /// Enrollment changes who reaches a port.
    #[error("enrollment changes something about {0} of the ports")]
    Changes(usize),
    /// What was to be collected cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// Kubernetes does not do what it is asked.
    #[error("cannot {what}: {cause}")]
    Kubernetes { what: String, cause: String },
    /// What Services lead to is not known, or not whole. Everything else was told.
    #[error(
        "ports of Services are left out: {0}\n  What to do: give --kubeconfig FILE, or set KUBECONFIG; the right to list endpointslices (discovery.k8s.io) and services is needed, and pods where a Service has no EndpointSlice."
    )]
    ServicesUnknown(Box<Self>),
    /// Nodes that can be reached have not left in time.
    #[error("not left in time: {0}")]
    NotLeft(String),
    /// A manifest, or what it is to be injected with, cannot be used.
    #[error("{0}")]
    Manifest(String),
    /// The runtime.
    #[error("cannot start: {0}")]
    Runtime(io::Error),
}

impl AskError {
    /// As `--help` says.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Kubernetes { .. } | Self::ServicesUnknown(_) => 3,
            Self::Changes(_) => 4,
            Self::Failed { .. }
            | Self::NotReady(_)
            | Self::Unseen(_)
            | Self::Json(_)
            | Self::Output(_)
            | Self::Unwell(_)
            | Self::Write { .. }
            | Self::NotLeft(_)
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
