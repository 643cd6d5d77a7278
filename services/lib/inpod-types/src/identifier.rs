use std::fmt;

/// A text that breaks the rule for identifiers of its kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} \"{}\" is invalid: {rule}", Excerpt(.text))]
pub struct InvalidIdentifier {
    kind: &'static str,
    text: String,
    rule: &'static str,
}

impl InvalidIdentifier {
    /// Creates the error for a text that breaks the given rule.
    pub(crate) fn new(kind: &'static str, text: &str, rule: &'static str) -> Self {
        Self {
            kind,
            text: text.to_owned(),
            rule,
        }
    }
}

/// Shows at most 80 characters, escaped, because the text ends up in logs and in a pod's events.
struct Excerpt<'a>(&'a str);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars().take(80) {
            write!(f, "{}", c.escape_debug())?;
        }
        if self.0.chars().nth(80).is_some() {
            write!(f, "...")?;
        }
        Ok(())
    }
}

/// Declares a newtype for text, which only `parse`, with the type's rule, can create.
macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $rule:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(Box<str>);

        impl TryFrom<String> for $name {
            type Error = $crate::InvalidIdentifier;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl $name {
            /// Returns the identifier as text, in the form that was parsed.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::InvalidIdentifier;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let valid: fn(&str) -> bool = $valid;
                if valid(text) {
                    Ok(Self(text.into()))
                } else {
                    Err($crate::InvalidIdentifier::new($kind, text, $rule))
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
pub(crate) use identifier;

/// Matches a DNS label (RFC 1123), the form of namespace names in Kubernetes.
pub(crate) fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_dns_part(text)
}

fn is_dns_part(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    edge(text.chars().next())
        && edge(text.chars().next_back())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// Matches the names of pods, nodes and service accounts in Kubernetes. The limit applies to the whole name, not to
/// each label as in RFC 1123 (apimachinery, `IsDNS1123Subdomain`).
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_part)
}

/// Matches container ids and network names (CNI): a letter or digit, then letters, digits, `_`, `.` or `-`.
pub fn is_cni_name(text: &str) -> bool {
    text.len() <= 253
        && text
            .chars()
            .next()
            .is_some_and(|c| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}
