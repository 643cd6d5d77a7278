//! Another pod forges the probes' source address.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    process::Command,
    time::Duration,
};

use netconfig::probes::ProbeSettings;
use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, sendto, socket},
};
use socket2::{Domain, Socket, Type};

use crate::{
    probes::place::{NODE, OnNode, POD, Place, STRANGER, spared, within},
    support::Fresh,
};

const LIMIT: Duration = Duration::from_secs(20);

fn sources() -> [IpAddr; 2] {
    ProbeSettings::default().sources().try_into().unwrap()
}

/// Gives the stranger the sources of probes: simpler than frames by NET_RAW, and with the same packets.
fn own_the_sources(stranger: &Fresh) {
    for setting in ["all", "eth0"] {
        let setting = format!("net.ipv4.conf.{setting}.rp_filter=0");
        stranger.command("sysctl", &["-qw", &setting]);
    }
    let [v4, v6] = sources();
    stranger.ip(&format!("addr add {v4}/32 dev eth0"));
    stranger.ip(&format!("addr add {v6}/128 dev eth0 nodad"));
}

/// Starts to connect from a source of probes, and returns before the connection is established.
fn begin_forged_probe(stranger: &Fresh, from: IpAddr, to: &str) -> Socket {
    let to = SocketAddr::new(to.parse().unwrap(), 8080);
    stranger.run(move || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
        let error = socket.connect(&to.into()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EINPROGRESS));
        socket
    })
}

/// Returns the number of packets that the node's tables dropped.
fn dropped(node: &Fresh) -> u64 {
    let text = node.nft("list ruleset");
    let rules = text.lines().filter(|line| line.ends_with(" drop"));
    let count = |line: &str| -> u64 {
        let (_, counts) = line.split_once("packets ").unwrap();
        counts.split(' ').next().unwrap().parse().unwrap()
    };
    rules.map(count).sum()
}

fn is_dropped_and_real_probes_pass(place: &Place) {
    for (from, to) in sources().into_iter().zip(POD) {
        let _forged = begin_forged_probe(&place.stranger, from, to);
        assert_eq!(place.arrival(), spared(to), "the forged probe would arrive");
    }
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    for (from, to) in sources().into_iter().zip(POD) {
        let before = dropped(&place.node);
        let forged = begin_forged_probe(&place.stranger, from, to);
        within(LIMIT, "the forged probe is dropped", || {
            dropped(&place.node) > before
        });
        // The next arrival is the node's probe, not the stranger's.
        assert_eq!(place.probe(0, to), spared(to));
        assert!(forged.peer_addr().is_err(), "{from} is connected");
    }
}

#[test]
fn a_forged_probe_reaches_no_pod_of_a_routed_network() {
    let place = Place::new();
    own_the_sources(&place.stranger);
    // The answers to the stranger need a route, which the answers to the node's probes do not use.
    for (from, via) in sources().into_iter().zip(STRANGER) {
        place.node.ip(&format!("route add {from} via {via}"));
    }
    is_dropped_and_real_probes_pass(&place);
}

#[test]
fn a_forged_probe_reaches_no_pod_behind_the_same_bridge() {
    let place = Place::bridged();
    own_the_sources(&place.stranger);
    let of_stranger = place.stranger.run(|| link("eth0").to_string());
    for node in NODE {
        place.pod.ip(&format!(
            "neigh replace {node} lladdr {of_stranger} dev eth0"
        ));
    }
    is_dropped_and_real_probes_pass(&place);
}

/// The EtherType and VLAN of a tag.
type Tag = (u16, u16);

const IGNORED: [Tag; 2] = [(0x8100, 0), (0x88a8, 0)];

/// The VLAN of a bridge's ports unless configured (ports' default PVID).
const OF_PORT: Tag = (0x8100, 1);

/// A kernel ignores any number of tags of VLAN 0 in front of a packet (services/docs/facts/kernel.md, 24).
#[test]
fn no_vlan_tag_hides_a_forged_probe_from_the_bridge() {
    let tags = [
        vec![],
        vec![IGNORED[0]],
        vec![IGNORED[1]],
        vec![IGNORED[0], IGNORED[0]],
        vec![IGNORED[0], IGNORED[1]],
        vec![IGNORED[1], IGNORED[0]],
        vec![IGNORED[0]; 3],
    ];
    let place = Place::bridged();
    arrive(&place, &tags);
    are_dropped_and_real_probes_pass(&place, &tags);
}

/// Such a bridge also removes a first tag of the ports' VLAN. A kernel without CONFIG_BRIDGE_VLAN_FILTERING forwards the
/// tag, so that only the drop can be tested.
#[test]
fn no_vlan_tag_hides_a_forged_probe_from_a_filtering_bridge() {
    let place = Place::bridged();
    let mut filter = Command::new("ip");
    filter.args([
        "link",
        "set",
        "br0",
        "type",
        "bridge",
        "vlan_filtering",
        "1",
    ]);
    let filters = place.node.run(move || filter.status()).unwrap().success();
    let tags = [
        vec![OF_PORT],
        vec![OF_PORT, IGNORED[0]],
        vec![OF_PORT, IGNORED[1]],
        vec![OF_PORT, IGNORED[0], IGNORED[0]],
    ];
    if filters {
        arrive(&place, &tags);
    }
    are_dropped_and_real_probes_pass(&place, &tags);
}

/// Sends a forged probe below the tags.
fn send(place: &Place, tags: &[Tag], from: IpAddr, to: &str) {
    let of_pod = place.pod.run(|| link("eth0").addr().unwrap());
    let (tags, to) = (tags.to_vec(), to.parse().unwrap());
    place.stranger.run(move || {
        let link = link("eth0");
        let header = [of_pod, link.addr().unwrap()].concat();
        let tags = tags.iter();
        let tags = tags.map(|(kind, vlan)| [kind.to_be_bytes(), vlan.to_be_bytes()].concat());
        let tags = tags.collect::<Vec<_>>().concat();
        let frame = [header, tags, packet(from, to)].concat();
        let flags = SockFlag::empty();
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None).unwrap();
        sendto(socket.as_raw_fd(), &frame, &link, MsgFlags::empty()).unwrap();
    });
}

fn arrive(place: &Place, tags: &[Vec<Tag>]) {
    for tags in tags {
        for (from, to) in sources().into_iter().zip(POD) {
            let before = segments(&place.pod);
            send(place, tags, from, to);
            within(LIMIT, &format!("{tags:x?} from {from} arrives"), || {
                segments(&place.pod) > before
            });
        }
    }
}

fn are_dropped_and_real_probes_pass(place: &Place, tags: &[Vec<Tag>]) {
    let host = OnNode::start(&place.node, ProbeSettings::default());
    host.set_addresses("c1", &POD);
    let before = segments(&place.pod);
    for tags in tags {
        for (from, to) in sources().into_iter().zip(POD) {
            let before = dropped(&place.node);
            send(place, tags, from, to);
            within(LIMIT, &format!("{tags:x?} from {from} is dropped"), || {
                dropped(&place.node) > before
            });
        }
    }
    assert_eq!(segments(&place.pod), before);
    for to in POD {
        assert_eq!(place.probe(0, to), spared(to));
    }
}

/// Must run in the netns of the interface.
fn link(interface: &str) -> LinkAddr {
    let mut all = getifaddrs().unwrap();
    let found = all.find_map(|found| {
        let is_wanted = found.interface_name == interface;
        let address = found.address.filter(|_| is_wanted)?;
        address.as_link_addr().copied()
    });
    found.unwrap()
}

/// Returns the number of TCP segments that arrived, InSegs of /proc/net/snmp.
fn segments(pod: &Fresh) -> u64 {
    let text = pod.command("cat", &["/proc/thread-self/net/snmp"]);
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut columns = names.split(' ').zip(values.split(' '));
    let (_, value) = columns.find(|(name, _)| *name == "InSegs").unwrap();
    value.parse().unwrap()
}

/// Returns an EtherType and an IP packet that opens a TCP connection.
fn packet(from: IpAddr, to: IpAddr) -> Vec<u8> {
    let syn = [
        [40000_u16.to_be_bytes(), 8080_u16.to_be_bytes()].concat(),
        vec![0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0],
    ]
    .concat();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
            header.extend([from.octets(), to.octets()].concat());
            let checksum = checksum(&header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            [vec![0x08, 0x00], header, syn].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let addresses = [from.octets(), to.octets()].concat();
            let header = vec![0x60, 0, 0, 0, 0, 20, 6, 64];
            [vec![0x86, 0xdd], header, addresses, syn].concat()
        }
        _ => panic!("{from} and {to} are of one family"),
    }
}

/// Returns the checksum of an IPv4 header (RFC 1071).
fn checksum(header: &[u8]) -> u16 {
    let words = header
        .chunks(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()
}
