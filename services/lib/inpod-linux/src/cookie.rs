use std::io;

use nix::{
    getsockopt_impl, libc, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

/// `SO_NETNS_COOKIE` of asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

sockopt_impl!(
    /// The cookie of the netns that a socket belongs to: a number that is never given twice until the node reboots.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    SO_NETNS_COOKIE,
    u64
);

/// The cookie of the calling thread's netns. Any socket tells it; a Unix one loads no protocol module.
pub(crate) fn current() -> io::Result<u64> {
    let socket = socket(
        AddressFamily::Unix,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    Ok(getsockopt(&socket, NetnsCookie)?)
}
