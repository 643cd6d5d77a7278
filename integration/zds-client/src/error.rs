//! What can go wrong on a ZDS connection, by whose fault it is.

use std::io;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody listens on the socket, or it is of another type.
    #[error("failed to connect to the agent")]
    Dial(#[source] io::Error),
    /// The agent accepted and went away before the hello.
    #[error("failed to say hello to the agent")]
    Hello(#[source] io::Error),
}

/// Why no request could be received. Its text is what the stock ztunnel answers.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// The packet could not be read. Answer, close the connection and connect again at once.
    #[error("failure to read message : {0}")]
    Read(#[from] ReadError),
    /// The agent broke the protocol. Answer and give up: the stock ztunnel exits.
    #[error("failure to process message : ProtocolError({:?})", .0.to_string())]
    Protocol(#[from] ProtocolError),
}

/// What was wrong with a packet.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The socket failed.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The packet was longer than the receive buffer, and the rest of it is lost.
    #[error("received truncated message")]
    Truncated,
    /// An Add came without a descriptor.
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
    /// The packet is no message of ZDS.
    #[error("{0}")]
    Decode(#[from] prost::DecodeError),
    /// The message says nothing, or something that this version does not know.
    #[error("no payload")]
    NoPayload,
}

/// Which rule of the protocol the agent broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// An Add did not say which pod it is about.
    #[error("workload_info is required")]
    MissingWorkloadInfo,
    /// A Keep came after the snapshot of this connection was complete.
    #[error("keep is not allowed after the snapshot was sent")]
    KeepAfterSnapshot,
    /// The snapshot of this connection was complete already.
    #[error("the snapshot was sent already")]
    SecondSnapshot,
}

/// Why an answer could not be given.
#[derive(Debug, thiserror::Error)]
pub enum AckError {
    /// Every request is answered: one more answer would be taken for the next request's.
    #[error("every request is answered already")]
    NothingOwed,
    /// The agent went away.
    #[error("failed to send the answer")]
    Socket(#[source] io::Error),
}
