//! The outcome of a request.

pub(crate) enum Done {
    Ack,
    /// Refused; the connection stays.
    StartFailure(String),
    /// Refused; the connection ends.
    ReadError(String),
    /// Refused; the process ends.
    ProtocolError(String),
    /// No answer is sent.
    Mute,
    Exit,
}
