//! What a ztunnel answers when it did not do what it was told.

/// The longest excerpt of a ztunnel's words that is kept.
const MAX_MESSAGE_BYTES: usize = 512;

/// Which kind of trouble a ztunnel reports, by the prefix that stock ztunnel gives its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NackKind {
    /// The pod's proxy did not start. The connection stays, and ztunnel is not ready while it retries.
    StartFailure,
    /// The packet could not be read. Stock ztunnel hangs up and reconnects.
    ReadError,
    /// The message was not allowed. Stock ztunnel exits.
    ProtocolError,
    /// Words of no known kind.
    Other,
}

/// A negative acknowledgement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nack {
    /// What it is about.
    pub kind: NackKind,
    /// ztunnel's words, cut to 512 bytes.
    pub message: String,
}

impl NackKind {
    /// Whether stock ztunnel hangs up or exits after it has said so.
    pub fn ends_session(self) -> bool {
        match self {
            Self::ReadError | Self::ProtocolError => true,
            Self::StartFailure | Self::Other => false,
        }
    }
}

impl Nack {
    /// Reads an acknowledgement's error; an empty one is no error.
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
    fn stock_ztunnels_prefixes_tell_the_kind() {
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
    fn long_words_are_cut_between_characters() {
        let nack = Nack::parse(&"ü".repeat(1000)).unwrap_err();
        assert_eq!(nack.message, "ü".repeat(256));
        let odd = Nack::parse(&format!("x{}", "ü".repeat(1000))).unwrap_err();
        assert_eq!(odd.message.len(), 511);
    }
}
