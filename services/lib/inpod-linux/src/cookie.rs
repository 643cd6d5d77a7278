use std::io;

use nix::{
    getsockopt_impl, libc, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

/// `SO_NETNS_COOKIE` of asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

sockopt_impl!(
    /// The cookie of a socket's network namespace: a number that is not reused until the node reboots.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    SO_NETNS_COOKIE,
    u64
);

/// Returns the cookie of the calling thread's network namespace. Any socket reports it; a Unix one
/// loads no protocol module.
pub(crate) fn current() -> io::Result<u64> {
    let socket = socket(
        AddressFamily::Unix,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    Ok(getsockopt(&socket, NetnsCookie)?)
}
