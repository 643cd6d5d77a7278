//! The possible outcomes of a request in this ztunnel.

pub(crate) enum Done {
    Ack,
    /// The request is refused, and the connection stays.
    StartFailure(String),
    /// The request is refused, and the connection ends.
    ReadError(String),
    /// The request is refused, and the process ends.
    ProtocolError(String),
    Mute,
    Exit,
}
