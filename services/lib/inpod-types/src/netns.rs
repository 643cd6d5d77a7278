use std::{fmt, path::PathBuf};

/// Which network namespace: proven by netconfig, never believed.
///
/// Device and inode alone are recycled as soon as a namespace is gone; the cookie never is (Linux 5.14,
/// `SO_NETNS_COOKIE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsId {
    /// `st_dev` of the namespace's file.
    pub device: u64,
    /// `st_ino` of the namespace's file.
    pub inode: u64,
    /// `SO_NETNS_COOKIE` of any socket in it.
    pub cookie: u64,
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}] cookie {}", self.inode, self.cookie)
    }
}

/// What a caller believes of a network namespace: where it is and, as far as it knows, which one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetnsRef {
    /// An absolute path.
    pub path: PathBuf,
    /// `st_dev`, where the caller looked.
    pub device: Option<u64>,
    /// `st_ino`, where the caller looked.
    pub inode: Option<u64>,
    /// The cookie, where an earlier proof is remembered.
    pub cookie: Option<u64>,
}

impl NetnsRef {
    /// A path of which nothing else is known.
    pub fn from_path(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            device: None,
            inode: None,
            cookie: None,
        }
    }

    /// Whether what is believed agrees with what was proven.
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
