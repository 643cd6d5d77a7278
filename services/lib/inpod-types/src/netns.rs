use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// The identity of a network namespace, verified by netconfig.
///
/// The kernel reuses device and inode of a namespace that is gone, but never the cookie (Linux 5.14,
/// `SO_NETNS_COOKIE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// The `st_dev` of the namespace's file.
    pub device: u64,
    /// The `st_ino` of the namespace's file.
    pub inode: u64,
    /// The `SO_NETNS_COOKIE` of every socket in the namespace.
    pub cookie: u64,
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}] cookie {}", self.inode, self.cookie)
    }
}

/// A caller's reference to a network namespace: the path, and the known parts of the identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsRef {
    /// The absolute path of the namespace's file.
    pub path: PathBuf,
    /// The expected `st_dev`, or `None` if the caller does not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
    /// The expected `st_ino`, or `None` if the caller does not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// The expected cookie, known only from an earlier verification.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cookie: Option<u64>,
}

impl NetnsRef {
    /// Refers to a namespace by path alone, without an expected identity.
    pub fn from_path(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            device: None,
            inode: None,
            cookie: None,
        }
    }

    /// Returns whether all known parts match the verified identity.
    pub fn agrees_with(&self, id: &NetnsId) -> bool {
        self.device.is_none_or(|device| device == id.device)
            && self.inode.is_none_or(|inode| inode == id.inode)
            && self.cookie.is_none_or(|cookie| cookie == id.cookie)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: NetnsId = NetnsId {
        device: 4,
        inode: 7,
        cookie: 9,
    };

    #[test]
    fn a_bare_path_agrees_with_whatever_is_found_there() {
        assert!(NetnsRef::from_path("/run/netns/a").agrees_with(&ID));
    }

    #[test]
    fn a_recycled_inode_with_another_cookie_does_not_agree() {
        let believed = NetnsRef {
            device: Some(4),
            inode: Some(7),
            cookie: Some(8),
            ..NetnsRef::from_path("/run/netns/a")
        };
        assert!(!believed.agrees_with(&ID));
    }
}
