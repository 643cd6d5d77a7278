use std::str::FromStr;

use crate::{
    error::{CniError, ErrorCode},
    version::SpecVersion,
};

/// The operation requested by a call (CNI spec, "CNI operations").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

impl Verb {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// Returns the first spec version that defines the verb.
    pub(super) fn since(self) -> SpecVersion {
        match self {
            Self::Add | Self::Del => SpecVersion::V0_1_0,
            Self::Version => SpecVersion::V0_2_0,
            Self::Check => SpecVersion::V0_4_0,
            Self::Gc | Self::Status => SpecVersion::V1_1_0,
        }
    }

    pub(super) fn require_version(self, version: SpecVersion) -> Result<(), CniError> {
        let since = self.since();
        if version >= since {
            return Ok(());
        }
        let verb = self.as_str();
        let msg =
            format!("{verb} needs cniVersion {since} or later, the configuration has {version}");
        Err(CniError::new(ErrorCode::IncompatibleVersion, msg))
    }
}

impl FromStr for Verb {
    type Err = CniError;

    fn from_str(text: &str) -> Result<Self, CniError> {
        let verbs = [
            Self::Add,
            Self::Del,
            Self::Check,
            Self::Gc,
            Self::Status,
            Self::Version,
        ];
        let found = verbs.into_iter().find(|verb| verb.as_str() == text);
        found.ok_or_else(|| {
            let excerpt: String = text.chars().take(80).collect();
            CniError::in_variable("CNI_COMMAND", format_args!("{excerpt:?} is not a CNI verb"))
        })
    }
}
