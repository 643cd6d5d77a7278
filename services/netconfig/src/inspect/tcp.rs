//! Parses `/proc/net/tcp` and `tcp6` (proc_net(5)), for kernels without sock_diag. Each line is a socket, with
//! addresses and ports in hexadecimal.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Socket {
    /// The local endpoint, in which IPv4-mapped addresses are converted to IPv4.
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: State,
    /// The socket's mark; `None` if the kernel did not report a mark.
    pub(super) mark: Option<u32>,
    /// The user id as numbered in netconfig's user namespace; `None` if not reported.
    pub(super) user: Option<u32>,
    /// True if the socket accepts connections to foreign addresses, or its listener did: IP_TRANSPARENT without
    /// IP_FREEBIND (ip(7)), since a socket connecting from a foreign address has IP_FREEBIND. `false` if not
    /// reported.
    pub(super) is_transparent: bool,
}

/// Socket states of linux/tcp_states.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Established,
    Listening,
    Other,
}

/// Parses all sockets of a table, and skips the heading, which does not parse.
pub(super) fn parse(table: &str) -> impl Iterator<Item = Socket> {
    table.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Socket> {
    let mut words = line.split_ascii_whitespace();
    let (_number, local, remote, state) =
        (words.next()?, words.next()?, words.next()?, words.next()?);
    // Skips queues, timer and retransmissions.
    let user = words.nth(3).and_then(|user| user.parse().ok());
    Some(Socket {
        local: end(local)?,
        remote: end(remote)?,
        state: match state {
            "01" => State::Established,
            "0A" => State::Listening,
            _ => State::Other,
        },
        mark: None,
        user,
        is_transparent: false,
    })
}

fn end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddr::new(
        self::address(address)?.to_canonical(),
        port,
    ))
}

/// Parses an address in which each group of 32 bits is a number in native byte order.
fn address(text: &str) -> Option<IpAddr> {
    let words = text.as_bytes().chunks(8).map(|digits| {
        let digits = std::str::from_utf8(digits).ok()?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    if let Ok(v4) = <[u8; 4]>::try_from(bytes.as_slice()) {
        return Some(Ipv4Addr::from(v4).into());
    }
    let v6 = <[u8; 16]>::try_from(bytes).ok()?;
    Some(Ipv6Addr::from(v6).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output on x86 and arm64.
    const V4: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:3A9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0200000A:3A99 0100000A:9C40 01 00000000:00000000 00:00000000 00000000  1337        0 2 1 0 20 4 30 10 -1
   2: 0200000A:3A99 0100000A:9C40 06 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1
";
    const V6: &str = "\
   0: 00000000000000000000000000000000:3AA0 00000000000000000000000000000000:0000 0A 00000000:00000000
   1: 000009FD000000000000000001000000:1F90 000009FD000000000000000002000000:9C40 01 00000000:00000000
   2: 0000000000000000FFFF00000200000A:3A99 0000000000000000FFFF00000100000A:9C40 01 00000000:00000000
";

    fn socket(local: &str, remote: &str, state: State) -> Socket {
        Socket {
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            state,
            mark: None,
            user: None,
            is_transparent: false,
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn both_ends_and_states_are_read_and_the_heading_is_not() {
        let found: Vec<_> = parse(V4).collect();
        let of = |user, socket| Socket {
            user: Some(user),
            ..socket
        };
        let wanted = [
            of(0, socket("0.0.0.0:15006", "0.0.0.0:0", State::Listening)),
            of(
                1337,
                socket("10.0.0.2:15001", "10.0.0.1:40000", State::Established),
            ),
            of(0, socket("10.0.0.2:15001", "10.0.0.1:40000", State::Other)),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn ipv6_addresses_are_read_and_ipv4_ones_in_them_are_ipv4() {
        let found: Vec<_> = parse(V6).collect();
        let wanted = [
            socket("[::]:15008", "[::]:0", State::Listening),
            socket("[fd09::1]:8080", "[fd09::2]:40000", State::Established),
            socket("10.0.0.2:15001", "10.0.0.1:40000", State::Established),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn an_address_of_another_length_is_none() {
        for text in ["", "0A00000102", "0A0000010A000001", "ZZZZZZZZ", "0A00000é"] {
            assert_eq!(address(text), None, "{text}");
        }
    }
}
