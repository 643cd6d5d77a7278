//! The errors that the plugin prints for the runtime (CNI spec, "Error").

use std::fmt;

/// The spec defines the codes up to 99, and the plugin its own from 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// 1: the `cniVersion` is unsupported, or does not have the requested verb.
    IncompatibleVersion,
    /// 2: the configuration has an unsupported field.
    UnsupportedField,
    /// 3: the container is unknown, so there is nothing to clean up.
    UnknownContainer,
    /// 4: an environment variable is missing or invalid, and the message names the variable.
    InvalidEnvironment,
    /// 5: the plugin could not read or write.
    Io,
    /// 6: the plugin could not decode the input.
    Decode,
    /// 7: the configuration is invalid, and the message names the key.
    InvalidConfig,
    /// 11: the call failed for now, but a retry can succeed.
    TryAgainLater,
    /// 50 (STATUS): the plugin cannot serve ADD at the moment.
    NotAvailable,
    /// 51 (STATUS): the plugin cannot serve ADD, and running containers may have limited
    /// connectivity.
    LimitedConnectivity,
    /// 100: the agent refused the call, and a retry does not help.
    Refused,
}

impl ErrorCode {
    pub fn number(self) -> u32 {
        match self {
            Self::IncompatibleVersion => 1,
            Self::UnsupportedField => 2,
            Self::UnknownContainer => 3,
            Self::InvalidEnvironment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::InvalidConfig => 7,
            Self::TryAgainLater => 11,
            Self::NotAvailable => 50,
            Self::LimitedConnectivity => 51,
            Self::Refused => 100,
        }
    }
}

/// An error for the runtime, shown in the pod's events as `msg; details`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct CniError {
    pub code: ErrorCode,
    pub msg: String,
    /// The remedy for an operator, or an empty text.
    pub details: String,
}

impl CniError {
    pub fn new(code: ErrorCode, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    #[must_use]
    pub fn with_details(self, details: impl Into<String>) -> Self {
        Self {
            details: details.into(),
            ..self
        }
    }

    pub fn in_config(key: &str, problem: impl fmt::Display) -> Self {
        let msg = format!("network configuration: {key}: {problem}");
        Self::new(ErrorCode::InvalidConfig, msg)
    }

    pub fn in_variable(variable: &str, problem: impl fmt::Display) -> Self {
        Self::new(
            ErrorCode::InvalidEnvironment,
            format!("{variable}: {problem}"),
        )
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (CNI error {})", self.msg, self.code.number())
    }
}
