//! The three ways into the chain, and the two out of it.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// How inpod gets into the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A file of its own ahead of the primary: a copy of it with the entry behind. After a reboot pods wait for the agent
    /// instead of slipping past it.
    Owned,
    /// The entry in the primary's own file, as the incumbent does by default.
    InPlace,
    /// A file with nothing but the entry, which something else calls: Multus, OpenShift.
    Standalone,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "owned" => Ok(Self::Owned),
            "in-place" => Ok(Self::InPlace),
            "standalone" => Ok(Self::Standalone),
            _ => Err("expected owned, in-place or standalone".to_owned()),
        }
    }
}

/// How inpod leaves the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leave {
    /// Everything is as it was before.
    Uninstall,
    /// The incumbent takes over: its entry comes back in the step that takes ours out.
    Handover,
}

impl Leave {
    /// What the file that says so says. Anything but the two words means stay; what is no word at all is given back, to
    /// be told.
    ///
    /// # Errors
    ///
    /// When something else is said.
    pub fn asked(text: &str) -> Result<Option<Self>, String> {
        match text.trim() {
            "" => Ok(None),
            "uninstall" => Ok(Some(Self::Uninstall)),
            "handover" => Ok(Some(Self::Handover)),
            other => Err(other.to_owned()),
        }
    }
}

impl fmt::Display for Leave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uninstall => "uninstall",
            Self::Handover => "handover",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_but_the_two_words_means_stay() {
        assert_eq!(Leave::asked("uninstall\n"), Ok(Some(Leave::Uninstall)));
        assert_eq!(Leave::asked("handover"), Ok(Some(Leave::Handover)));
        assert_eq!(Leave::asked(" \n"), Ok(None));
        assert_eq!(Leave::asked("Uninstall"), Err("Uninstall".to_owned()));
    }
}
