//! The errors of a ZDS connection, by the side that is at fault.

use std::io;

/// The reason why no connection was made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No process listens on the socket, or the socket has another type.
    #[error("failed to connect to the agent")]
    Dial(#[source] io::Error),
    /// The agent accepted the connection and closed it before the hello.
    #[error("failed to say hello to the agent")]
    Hello(#[source] io::Error),
}

/// The reason why no request was received. The text is equal to stock ztunnel's answer.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// The packet could not be read. Answer, close the connection and connect again at once.
    #[error("failure to read message : {0}")]
    Read(#[from] ReadError),
    /// The agent broke the protocol. Answer and give up, like stock ztunnel, which exits.
    #[error("failure to process message : ProtocolError({:?})", .0.to_string())]
    Protocol(#[from] ProtocolError),
}

/// The reason why a packet could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The socket returned an error.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The packet was longer than the receive buffer, and the rest is lost.
    #[error("received truncated message")]
    Truncated,
    /// An Add arrived without a descriptor.
    #[error("No control message")]
    NoDescriptor,
    /// The packet carried more than one descriptor.
    #[error("Expected 1 FD, got {0}")]
    ManyDescriptors(usize),
    /// The packet carried more descriptors than there was room for.
    #[error("ENOBUFS: No buffer space available")]
    DescriptorsTruncated,
    /// A request other than Add came with a descriptor.
    #[error("Unexpected control message")]
    UnexpectedDescriptor,
    /// The packet is not a ZDS message.
    #[error("{0}")]
    Decode(#[from] prost::DecodeError),
    /// The message has no payload, or a payload that this version does not know.
    #[error("no payload")]
    NoPayload,
}

/// The rule of the protocol that the agent broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// An Add did not name its pod.
    #[error("workload_info is required")]
    MissingWorkloadInfo,
    /// A Keep arrived after the snapshot of this connection was complete.
    #[error("keep is not allowed after the snapshot was sent")]
    KeepAfterSnapshot,
    /// A second SnapshotSent arrived on this connection.
    #[error("the snapshot was sent already")]
    SecondSnapshot,
}

/// The reason why an answer could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum AckError {
    /// Every request is answered already: the agent would take another answer for the answer to the next request.
    #[error("every request is answered already")]
    NothingOwed,
    /// The agent closed the connection.
    #[error("failed to send the answer")]
    Socket(#[source] io::Error),
}
