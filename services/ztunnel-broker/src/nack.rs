//! Negative acknowledgements of ztunnel.

const MAX_MESSAGE_BYTES: usize = 512;

/// The kind of an error, by the prefix of stock ztunnel's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NackKind {
    /// The pod's proxy did not start. The connection stays, and ztunnel is not ready while it retries the pod.
    StartFailure,
    /// The packet could not be read, so stock ztunnel closes the connection and reconnects.
    ReadError,
    /// The message was not allowed, so stock ztunnel exits.
    ProtocolError,
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nack {
    pub kind: NackKind,
    /// The error text, truncated to 512 bytes.
    pub message: String,
}

impl NackKind {
    /// Returns whether stock ztunnel closes the connection or exits afterwards.
    pub fn ends_session(self) -> bool {
        match self {
            Self::ReadError | Self::ProtocolError => true,
            Self::StartFailure | Self::Other => false,
        }
    }
}

impl Nack {
    /// Parses the error of a response. An empty error means success.
    pub fn parse(error: &str) -> Result<(), Self> {
        if error.is_empty() {
            return Ok(());
        }
        let message = error.get(..error.floor_char_boundary(MAX_MESSAGE_BYTES));
        Err(Self {
            kind: kind_of(error),
            message: message.unwrap_or_default().to_owned(),
        })
    }
}

fn kind_of(error: &str) -> NackKind {
    let kinds = [
        ("failure to start proxy", NackKind::StartFailure),
        ("failure to read message", NackKind::ReadError),
        ("failure to process message", NackKind::ProtocolError),
    ];
    let found = kinds.iter().find(|(prefix, _)| error.starts_with(prefix));
    found.map_or(NackKind::Other, |(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_error_is_an_acknowledgement() {
        assert_eq!(Nack::parse(""), Ok(()));
    }

    #[test]
    fn stock_ztunnels_prefixes_determine_the_kind() {
        let table = [
            ("failure to start proxy : Bind(..)", NackKind::StartFailure),
            (
                "failure to read message : received truncated message",
                NackKind::ReadError,
            ),
            (
                "failure to process message : ProtocolError(\"..\")",
                NackKind::ProtocolError,
            ),
            ("out of cheese", NackKind::Other),
        ];
        for (message, kind) in table {
            assert_eq!(Nack::parse(message).unwrap_err().kind, kind, "{message}");
        }
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let nack = Nack::parse(&"ü".repeat(1000)).unwrap_err();
        assert_eq!(nack.message, "ü".repeat(256));
        let odd = Nack::parse(&format!("x{}", "ü".repeat(1000))).unwrap_err();
        assert_eq!(odd.message.len(), 511);
    }
}
