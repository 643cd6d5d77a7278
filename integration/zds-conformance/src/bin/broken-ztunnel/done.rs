//! How a request ends.

/// How a request ends.
pub(crate) enum Done {
    Ack,
    /// Refused; the connection stays.
    StartFailure(String),
    /// Refused; the connection ends.
    ReadError(String),
    /// Refused; the process ends.
    ProtocolError(String),
    /// Nothing is answered.
    Mute,
    Exit,
}
