//! The supported versions of the CNI spec (CNI spec, "VERSION").

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::error::{CniError, ErrorCode};

/// A version of the CNI spec; a later version compares as greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecVersion {
    /// 0.1.0: results have at most one address of each family. A configuration without a version has this version.
    V0_1_0,
    /// 0.2.0: adds VERSION.
    V0_2_0,
    /// 0.3.0: results have several addresses and interfaces, and plugins form a chain.
    V0_3_0,
    V0_3_1,
    /// 0.4.0: adds CHECK, and gives DEL a prevResult.
    V0_4_0,
    /// 1.0.0: removes `version` from the entries of `ips`.
    V1_0_0,
    /// 1.1.0: adds GC and STATUS.
    V1_1_0,
}

impl SpecVersion {
    pub const ALL: [Self; 7] = [
        Self::V0_1_0,
        Self::V0_2_0,
        Self::V0_3_0,
        Self::V0_3_1,
        Self::V0_4_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];

    pub const NEWEST: Self = Self::V1_1_0;

    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// Returns the version of the configuration, even if nothing else can be parsed, or else the newest.
    pub fn for_reply(stdin: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Request<'a> {
            #[serde(rename = "cniVersion")]
            version: Option<&'a str>,
        }
        let request = serde_json::from_slice::<Request<'_>>(stdin).ok();
        request
            .and_then(|request| request.version.unwrap_or_default().parse().ok())
            .unwrap_or(Self::NEWEST)
    }

    /// Formats the output of VERSION (CNI spec, "VERSION").
    pub fn report(self) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Report {
            cni_version: &'static str,
            supported_versions: [&'static str; SpecVersion::ALL.len()],
        }
        let report = Report {
            cni_version: self.as_str(),
            supported_versions: Self::ALL.map(Self::as_str),
        };
        serde_json::to_string(&report).unwrap_or_default()
    }

    /// Formats an error (CNI spec, "Error").
    pub fn render_error(self, error: &CniError) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Object<'a> {
            cni_version: &'static str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let object = Object {
            cni_version: self.as_str(),
            code: error.code.number(),
            msg: &error.msg,
            details: &error.details,
        };
        serde_json::to_string(&object).unwrap_or_default()
    }
}

impl fmt::Display for SpecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SpecVersion {
    type Err = CniError;

    /// Parses an empty text as 0.1.0: libcni passes `"cniVersion": ""` for a list without a version (`buildOneConfig`),
    /// and plugins in Go read a missing or empty version as 0.1.0 (`create.DecodeVersion`).
    fn from_str(text: &str) -> Result<Self, CniError> {
        if text.is_empty() {
            return Ok(Self::V0_1_0);
        }
        let found = Self::ALL.into_iter().find(|known| known.as_str() == text);
        found.ok_or_else(|| {
            let supported = Self::ALL.map(Self::as_str).join(", ");
            CniError::new(
                ErrorCode::IncompatibleVersion,
                format!("cniVersion {text:?} is not supported by inpod-cni; supported versions: {supported}"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_is_read_back_from_its_text() {
        for version in SpecVersion::ALL {
            assert_eq!(version.as_str().parse(), Ok(version));
        }
    }

    #[test]
    fn versions_are_ordered_by_age() {
        assert!(SpecVersion::ALL.is_sorted());
        assert_eq!(SpecVersion::ALL.last(), Some(&SpecVersion::NEWEST));
    }

    #[test]
    fn an_unknown_version_is_error_1_and_lists_the_supported_ones() {
        for text in ["0.0.0", "0.5.0", "1.2.0", "1.0", "v1.0.0", " "] {
            let error = text.parse::<SpecVersion>().unwrap_err();
            assert_eq!(error.code, ErrorCode::IncompatibleVersion, "{text}");
            let listed = "0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0";
            assert!(error.msg.ends_with(listed), "{error}");
        }
    }

    #[test]
    fn the_report_is_in_the_version_that_was_asked() {
        assert_eq!(
            SpecVersion::for_reply(br#"{"cniVersion":"1.0.0"}"#).report(),
            r#"{"cniVersion":"1.0.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}"#
        );
    }

    #[test]
    fn a_missing_or_empty_version_is_0_1_0() {
        for stdin in [
            "{}",
            r#"{"name":7}"#,
            r#"{"cniVersion":""}"#,
            r#"{"cniVersion":null}"#,
        ] {
            assert_eq!(
                SpecVersion::for_reply(stdin.as_bytes()),
                SpecVersion::V0_1_0,
                "{stdin}"
            );
        }
    }

    #[test]
    fn a_call_without_a_usable_version_is_answered_in_the_newest() {
        for stdin in [
            "",
            "{",
            "[]",
            r#"{"cniVersion":7}"#,
            r#"{"cniVersion":"2.0.0"}"#,
        ] {
            assert_eq!(
                SpecVersion::for_reply(stdin.as_bytes()),
                SpecVersion::NEWEST
            );
        }
    }

    #[test]
    fn an_error_object_has_the_keys_of_the_spec() {
        let error = CniError::new(ErrorCode::TryAgainLater, "the agent is away")
            .with_details("Check that pod-events runs on this node.");
        assert_eq!(
            SpecVersion::V0_4_0.render_error(&error),
            r#"{"cniVersion":"0.4.0","code":11,"msg":"the agent is away","details":"Check that pod-events runs on this node."}"#
        );
    }

    #[test]
    fn empty_details_are_left_out() {
        let error = CniError::new(ErrorCode::Refused, "no \"such\" pod");
        assert_eq!(
            SpecVersion::V1_1_0.render_error(&error),
            r#"{"cniVersion":"1.1.0","code":100,"msg":"no \"such\" pod"}"#
        );
    }
}
