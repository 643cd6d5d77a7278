use std::{fmt, path::PathBuf};

/// A network namespace's identity, verified by netconfig.
///
/// The kernel reuses device and inode of a namespace that is gone, but never the
/// cookie (Linux 5.14, `SO_NETNS_COOKIE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsId {
    /// `st_dev` of its file.
    pub device: u64,
    /// `st_ino` of its file.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` of its sockets.
    pub cookie: u64,
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}] cookie {}", self.inode, self.cookie)
    }
}

/// A caller's reference: path and known identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetnsRef {
    /// The path, which is absolute.
    pub path: PathBuf,
    /// The expected `st_dev`, if known.
    pub device: Option<u64>,
    /// The expected `st_ino`, if known.
    pub inode: Option<u64>,
    /// Known from an earlier verification.
    pub cookie: Option<u64>,
}

impl NetnsRef {
    /// Refers by path alone.
    pub fn from_path(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            device: None,
            inode: None,
            cookie: None,
        }
    }

    /// Returns whether all expectations match the verified identity.
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
