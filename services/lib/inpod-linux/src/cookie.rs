use std::io;

use nix::{
    getsockopt_impl, libc, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

/// The socket option's number in asm-generic/socket.h, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

sockopt_impl!(
    /// The cookie of a socket's netns, a number that is not reused until the node reboots.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    SO_NETNS_COOKIE,
    u64
);

/// Reads the cookie from a Unix socket, because creating one loads no protocol module; any socket would do.
pub(crate) fn current() -> io::Result<u64> {
    let socket = socket(
        AddressFamily::Unix,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    Ok(getsockopt(&socket, NetnsCookie)?)
}
