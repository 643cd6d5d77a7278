use std::net::SocketAddr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Socket {
    /// The local endpoint, in which IPv4-mapped addresses are converted to IPv4.
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: State,
    /// The socket's mark; `None` if the kernel did not report a mark.
    pub(super) mark: Option<u32>,
    /// The user id as numbered in netconfig's user namespace.
    pub(super) user: u32,
    /// True if the socket accepts connections to foreign addresses, or its listener did: IP_TRANSPARENT without
    /// IP_FREEBIND (ip(7)), since a socket connecting from a foreign address has IP_FREEBIND.
    pub(super) is_transparent: bool,
    /// The number of the socket's inode, 0 without a descriptor.
    pub(super) inode: u32,
    /// The identifier of the opening process's cgroup of version 2, if the kernel reports cgroups.
    pub(super) cgroup: Option<u64>,
}

/// Socket states of linux/tcp_states.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Established,
    Listening,
    Other,
}
