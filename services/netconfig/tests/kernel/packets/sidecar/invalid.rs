//! `drop_invalid` drops packets without a connection, of any protocol.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use netconfig::{Family, rules::Sidecar};
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    mesh::{Mesh, PROXY},
    process::Role,
    settings,
};
use crate::packets::{
    probe::SILENCE,
    world::{Pod, World, outside, pod},
};

/// The wait for a packet that comes.
const PATIENCE: Duration = Duration::from_secs(20);

/// An unsolicited, numbered echo reply of ICMP (type 0) or ICMPv6 (type 129).
fn answer_to_nobody(family: Family, number: u16) -> [u8; 8] {
    let kind = match family {
        Family::V4 => 0,
        Family::V6 => 129,
    };
    let [high, low] = number.to_be_bytes();
    let mut packet = [kind, 0, 0, 0, high, low, 0, 0];
    // The kernel computes ICMPv6's checksum.
    if family == Family::V4 {
        let words = packet
            .chunks(2)
            .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
        let sum: u32 = words.sum();
        let folded = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
        [packet[2], packet[3]] = (!folded).to_be_bytes();
    }
    packet
}

fn raw(family: Family) -> Socket {
    let (domain, protocol) = match family {
        Family::V4 => (Domain::IPV4, Protocol::ICMPV4),
        Family::V6 => (Domain::IPV6, Protocol::ICMPV6),
    };
    Socket::new(domain, Type::RAW, Some(protocol)).unwrap()
}

/// Waits for the packet as long as that.
pub(super) fn is_seen(world: &World, family: Family, wait: Duration) -> bool {
    let number = world.port();
    let packet = answer_to_nobody(family, number);
    let heard = world.pod.run(move || raw(family));
    heard.set_read_timeout(Some(wait)).unwrap();
    let to = SocketAddr::new(pod(family), 0);
    let from: IpAddr = outside(family);
    let sender = world
        .at(crate::packets::world::Place::Outside)
        .run(move || raw(family));
    sender.bind(&SocketAddr::new(from, 0).into()).unwrap();
    sender.send_to(&packet, &to.into()).unwrap();
    let deadline = Instant::now() + wait;
    while Instant::now() < deadline {
        match receive(&heard) {
            Ok(bytes)
                if bytes
                    .windows(6)
                    .any(|some| some[0] == packet[0] && some[4..] == packet[4..6]) =>
            {
                return true;
            }
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    false
}

fn receive(socket: &Socket) -> io::Result<Vec<u8>> {
    use std::io::Read as _;

    let mut buffer = [0; 256];
    let mut socket: &Socket = socket;
    let length = socket.read(&mut buffer)?;
    Ok(buffer[..length].to_vec())
}

#[test]
fn what_belongs_to_no_connection_is_dropped_only_where_that_is_wished() {
    assert_ne!(outside(Family::V6), IpAddr::V6(Ipv6Addr::LOCALHOST));
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Answers);
    let check = |settings: Option<&Sidecar>, wanted: [bool; 2]| {
        settings.inspect(|settings| assert!(mesh.apply(settings)));
        for (family, wanted) in Family::ALL.into_iter().zip(wanted) {
            let wait = if wanted { PATIENCE } else { SILENCE };
            let found = is_seen(&mesh.world, family, wait);
            assert_eq!(found, wanted, "{family} {settings:?}");
        }
    };
    check(None, [true; 2]);
    check(Some(&settings::basic()), [true; 2]);
    let drops = Sidecar {
        drop_invalid: true,
        ..settings::basic()
    };
    check(Some(&drops), [false; 2]);
    let of_ipv4 = Sidecar {
        ipv6: netconfig::rules::Ipv6::Off,
        ..drops
    };
    check(Some(&of_ipv4), [false, true]);
}
