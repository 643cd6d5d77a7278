//! Finds the receiver of a connection in the kernel's tables of TCP sockets, which every user may read (proc(5),
//! `/proc/net/tcp`).

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// The IPv4 connections of a dual-stack listener are in the second table.
const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// Returns the port of `ports` that received the connection from `caller`.
pub(crate) fn receiver(caller: SocketAddr, ports: &[u16]) -> Option<u16> {
    if ports.is_empty() {
        return None;
    }
    let tables = TABLES
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    tables
        .into_iter()
        .find_map(|table| receiver_in(&table, caller, ports))
}

pub(crate) fn is_readable() -> bool {
    TABLES.iter().any(|path| fs::File::open(path).is_ok())
}

fn receiver_in(table: &str, caller: SocketAddr, ports: &[u16]) -> Option<u16> {
    let mut rows = table.lines().skip(1).filter_map(row);
    rows.find(|(own, remote)| *remote == caller && ports.contains(&own.port()))
        .map(|(own, _)| own.port())
}

/// Parses the local and the remote address of a row.
fn row(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut fields = line.split_whitespace().skip(1);
    Some((address(fields.next()?)?, address(fields.next()?)?))
}

/// Parses an address, which consists of 32-bit integers in native byte order and a port. An IPv4-mapped address is
/// converted to IPv4.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let integer = |at: usize| {
        let digits = host.get(8 * at..8 * at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip = match host.len() {
        8 => IpAddr::V4(Ipv4Addr::from(integer(0)?)),
        32 => {
            let fields = [integer(0)?, integer(1)?, integer(2)?, integer(3)?];
            let bytes = <[u8; 16]>::try_from(fields.concat()).ok()?;
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The tables come from a little-endian machine with a dual-stack listener on 15006.
    const V4: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:3A9A 0600007F:3A9A 01 00000000:00000000 00:00000000 00000000  1337        0 1
   1: 0100007F:9C40 0600007F:3A9A 01 00000000:00000000 00:00000000 00000000  1337        0 2
   2: garbage
";
    const V6: &str = "\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:3A9E 00000000000000000000000000000000:0000 0A
   1: 0000000000000000FFFF00000100007F:3A9E 0000000000000000FFFF00000100007F:9C40 01
   2: 00000000000000000000000001000000:3A9E 00000000000000000000000001000000:9C41 01
";

    #[cfg(target_endian = "little")]
    #[test]
    fn a_connection_is_found_where_it_was_received() {
        let caller = |text: &str| text.parse().unwrap();
        let ports = [15006, 15001];
        assert_eq!(
            receiver_in(V6, caller("127.0.0.1:40000"), &ports),
            Some(15006)
        );
        assert_eq!(receiver_in(V6, caller("[::1]:40001"), &ports), Some(15006));
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_connection_of_another_at_another_port_or_its_own_end_does_not_match() {
        let caller = |text: &str| text.parse().unwrap();
        assert_eq!(receiver_in(V4, caller("127.0.0.1:40000"), &[15006]), None);
        assert_eq!(receiver_in(V6, caller("127.0.0.1:40009"), &[15006]), None);
        assert_eq!(receiver_in(V6, caller("127.0.0.1:40000"), &[15001]), None);
        assert_eq!(receiver_in("", caller("127.0.0.1:40000"), &[15006]), None);
    }
}
