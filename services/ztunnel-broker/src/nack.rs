//! Negative acknowledgements of ztunnel.

use inpod_proto::ztunnelbroker::v1::Refusal;

const MAX_MESSAGE_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nack {
    /// The kind of the error, by the prefix of stock ztunnel's message.
    pub kind: Refusal,
    /// The error text, truncated to 512 bytes.
    pub message: String,
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

    /// Returns whether stock ztunnel closes the connection or exits afterwards.
    pub fn ends_session(&self) -> bool {
        matches!(self.kind, Refusal::ReadError | Refusal::ProtocolError)
    }
}

fn kind_of(error: &str) -> Refusal {
    let kinds = [
        // The pod's proxy did not start. The connection stays, and ztunnel is not ready while it retries the pod.
        ("failure to start proxy", Refusal::StartFailure),
        // The packet could not be read, so stock ztunnel closes the connection and reconnects.
        ("failure to read message", Refusal::ReadError),
        // The message was not allowed, so stock ztunnel exits.
        ("failure to process message", Refusal::ProtocolError),
    ];
    let found = kinds.iter().find(|(prefix, _)| error.starts_with(prefix));
    found.map_or(Refusal::Other, |(_, kind)| *kind)
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
            ("failure to start proxy : Bind(..)", Refusal::StartFailure),
            (
                "failure to read message : received truncated message",
                Refusal::ReadError,
            ),
            (
                "failure to process message : ProtocolError(\"..\")",
                Refusal::ProtocolError,
            ),
            ("out of cheese", Refusal::Other),
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
