//! `/proc/net/tcp` and `tcp6` (proc_net(5)): one socket a line, addresses and ports in hexadecimal. For kernels
//! without sock_diag.

/// A socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Socket {
    /// Its own port.
    pub(super) port: u16,
    pub(super) state: State,
}

/// What it does (enum in linux/tcp_states.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Established,
    Listening,
    Other,
}

/// The sockets of a table. Its first line is the heading, which is no socket.
pub(super) fn parse(table: &str) -> impl Iterator<Item = Socket> {
    table.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Socket> {
    let mut words = line.split_ascii_whitespace();
    let (_number, local, _remote, state) =
        (words.next()?, words.next()?, words.next()?, words.next()?);
    let (_address, port) = local.rsplit_once(':')?;
    Some(Socket {
        port: u16::from_str_radix(port, 16).ok()?,
        state: match state {
            "01" => State::Established,
            "0A" => State::Listening,
            _ => State::Other,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:3A9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0200000A:3A99 0100000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   2: 0200000A:3A99 0100000A:9C41 06 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1
";
    const V6: &str = "   0: 00000000000000000000000000000000:3AA0 00000000000000000000000000000000:0000 0A 00000000:00000000\n";

    fn socket(port: u16, state: State) -> Socket {
        Socket { port, state }
    }

    #[test]
    fn ports_and_states_are_read_and_the_heading_is_not() {
        let found: Vec<_> = parse(V4).collect();
        let wanted = [
            socket(15006, State::Listening),
            socket(15001, State::Established),
            socket(15001, State::Other),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn ipv6_addresses_do_not_hide_the_port() {
        assert_eq!(
            parse(V6).collect::<Vec<_>>(),
            [socket(15008, State::Listening)]
        );
    }
}
