//! Evaluates the rules of a foreign chain for the first packet of a redirected connection. Matches are often unknown, so
//! a chain counts as dropping only if no rule can accept the packet.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::{
    family::Family,
    marks::{FROM_ZTUNNEL, INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT},
    netlink::KernelError,
    nftables::{
        Base, ChainOutline, Ct, ESTABLISHED_MATCH, Meta, Nftables, Op, TCP_SYN, TableOutline,
        destination_of, ether_type_of, protocol_family,
    },
    rules::{Base as RuleBase, Hook, Policy, TableFamily, ambient::NAT_PRIORITY},
};

/// IPPROTO_TCP.
const TCP: u8 = 6;

/// IP_CT_NEW as a state bit (NF_CT_STATE_BIT).
const NEW: u32 = 8;

/// The length of an interface name with its padding (IFNAMSIZ).
const INTERFACE_NAME_BYTES: usize = 16;

/// Expressions without an effect on the packet.
const STATEMENTS: [&str; 3] = ["log", "last", "notrack"];

/// Expressions with the single effect of ending a rule.
const CONDITIONS: [&str; 6] = ["match", "limit", "fib", "connlimit", "quota", "range"];

/// The maximum of rules in an evaluated chain: any process with NET_ADMIN in the netns can add rules.
const MAX_RULES: u32 = 256;

/// The connections dropped by a chain.
#[derive(Debug)]
pub(super) struct DroppedTraffic {
    family: TableFamily,
    table: String,
    chain: String,
    outbound: bool,
    inbound: bool,
}

impl DroppedTraffic {
    pub(super) fn is_by(&self, table: &TableOutline, chain: &ChainOutline) -> bool {
        let table = (self.family, &self.table) == (table.family, &table.name);
        table && self.chain == chain.name
    }
}

impl fmt::Display for DroppedTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.outbound, self.inbound) {
            (true, false) => "the pod's outbound connections",
            (false, true) => "connections to the pod",
            _ => "connections from and to the pod",
        })
    }
}

/// Finds the chains with a drop policy without an accepting rule for connections to `ports`, the redirection's targets.
pub(super) fn find_dropped(
    nftables: &mut Nftables,
    tables: &[TableOutline],
    ports: &BTreeSet<u16>,
) -> Result<Vec<DroppedTraffic>, KernelError> {
    let mut found = Vec::new();
    for (table, chain, base) in suspects(tables) {
        let rules = nftables.read_expressions(table.family, &table.name, &chain.name)?;
        let families = Family::ALL.into_iter().filter(|it| table.family.has(*it));
        let packets = families.flat_map(Packet::of_family);
        let seen = packets.filter(|it| it.hook == base.hook && it.goes_to(ports));
        let dropped = seen.filter(|it| drops(&rules, base.policy, it));
        let (outbound, inbound): (Vec<_>, Vec<_>) = dropped.partition(Packet::is_outbound);
        if !outbound.is_empty() || !inbound.is_empty() {
            found.push(DroppedTraffic {
                family: table.family,
                table: table.name.clone(),
                chain: chain.name.clone(),
                outbound: !outbound.is_empty(),
                inbound: !inbound.is_empty(),
            });
        }
    }
    Ok(found)
}

/// Returns the chains with a drop policy behind the redirection.
fn suspects(
    tables: &[TableOutline],
) -> impl Iterator<Item = (&TableOutline, &ChainOutline, RuleBase)> {
    let chains = tables
        .iter()
        .flat_map(|table| table.chains.iter().map(move |chain| (table, chain)));
    chains.filter_map(|(table, chain)| {
        let base = chain.base?;
        let is_behind = match base.hook {
            Hook::Output => base.priority > NAT_PRIORITY,
            Hook::Input => true,
            Hook::Prerouting | Hook::Forward | Hook::Postrouting => false,
        };
        let is_suspect = base.policy == Policy::Drop && is_behind && chain.uses <= MAX_RULES;
        is_suspect.then_some((table, chain, base))
    })
}

/// The first packet of a redirected connection, or of ztunnel's onward connection, as a chain behind the redirection
/// sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    family: Family,
    hook: Hook,
    /// True if the packet arrives by `lo`. Redirected packets do not leave by `lo`: chains of the output hook still see
    /// the interface of the original route (tested on 6.18).
    by_loopback: bool,
    /// `None` if the address is not known.
    destination: Option<IpAddr>,
    /// `None` if the port is not known.
    port: Option<u16>,
    mark: u32,
}

impl Packet {
    /// Returns the packets of a connection from the pod, before and behind ztunnel, and of connections to the pod.
    fn of_family(family: Family) -> [Self; 5] {
        let loopback = match family {
            Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        };
        let outbound = Self {
            family,
            hook: Hook::Output,
            by_loopback: false,
            destination: Some(loopback),
            port: Some(OUTBOUND_PORT),
            mark: 0,
        };
        let inbound = |port| Self {
            hook: Hook::Input,
            destination: None,
            port: Some(port),
            ..outbound
        };
        let onward = Self {
            destination: None,
            port: None,
            mark: FROM_ZTUNNEL.value(),
            ..outbound
        };
        let looped = Self {
            hook: Hook::Input,
            by_loopback: true,
            ..outbound
        };
        let [plaintext, hbone] = [INBOUND_PLAINTEXT_PORT, INBOUND_HBONE_PORT].map(inbound);
        [outbound, looped, onward, plaintext, hbone]
    }

    fn goes_to(&self, ports: &BTreeSet<u16>) -> bool {
        let port = self.port.unwrap_or(OUTBOUND_PORT);
        ports.contains(&port)
    }

    fn is_outbound(&self) -> bool {
        self.port.is_none_or(|port| port == OUTBOUND_PORT)
    }
}

/// The content of the register.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Known(Vec<u8>),
    /// The name of an interface other than `lo`.
    NotLoopback,
    Unknown,
}

/// The effect of a rule on the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Accepts,
    Drops,
    /// The rule does not match.
    None,
    Unknown,
}

/// Returns whether a chain certainly drops the packet.
fn drops(rules: &[Vec<Op>], policy: Policy, packet: &Packet) -> bool {
    for rule in rules {
        match evaluate(rule, packet) {
            Effect::Drops => return true,
            Effect::Accepts | Effect::Unknown => return false,
            Effect::None => {}
        }
    }
    policy == Policy::Drop
}

fn evaluate(rule: &[Op], packet: &Packet) -> Effect {
    let mut value = Value::Unknown;
    let mut may_match = false;
    for op in rule {
        match op {
            Op::Meta(meta) => value = load_meta(*meta, packet),
            Op::Ct(Ct::State) => value = Value::Known(NEW.to_ne_bytes().into()),
            Op::Ct(Ct::Mark) => value = Value::Known(vec![0; 4]),
            Op::Payload { base, offset, len } => value = load_payload(*base, *offset, *len, packet),
            Op::Bitwise { mask, xor } => value = masked(&value, mask, xor),
            Op::Cmp { equal, data } => match compare(&value, data) {
                Some(is_equal) if is_equal != *equal => return Effect::None,
                Some(_) => {}
                None => may_match = true,
            },
            Op::Unknown(name) if name == ESTABLISHED_MATCH => return Effect::None,
            Op::Unknown(name) if CONDITIONS.contains(&name.as_str()) => may_match = true,
            Op::Lookup(_) => may_match = true,
            Op::Unknown(name) if STATEMENTS.contains(&name.as_str()) => {}
            Op::Counter | Op::SetMeta(_) | Op::SetCt(_) => {}
            Op::Ct(Ct::Zone) | Op::SocketMark | Op::Immediate(_) => value = Value::Unknown,
            Op::Accept if !may_match => return Effect::Accepts,
            Op::Drop | Op::Reject(_) if !may_match => return Effect::Drops,
            // The packet then depends on later rules and the policy.
            Op::Drop | Op::Reject(_) => return Effect::None,
            Op::Accept | Op::Redirect | Op::SourceNat(_) | Op::Tproxy(_) | Op::Unknown(_) => {
                return Effect::Unknown;
            }
        }
    }
    Effect::None
}

fn load_meta(meta: Meta, packet: &Packet) -> Value {
    match meta {
        Meta::Family => Value::Known(vec![protocol_family(packet.family)]),
        Meta::EtherType => Value::Known(ether_type_of(packet.family).to_be_bytes().into()),
        Meta::Protocol => Value::Known(vec![TCP]),
        Meta::Mark => Value::Known(packet.mark.to_ne_bytes().into()),
        Meta::InName if packet.hook == Hook::Input && packet.by_loopback => {
            let mut name = b"lo".to_vec();
            name.resize(INTERFACE_NAME_BYTES, 0);
            Value::Known(name)
        }
        Meta::InName if packet.hook == Hook::Input => Value::NotLoopback,
        Meta::OutName if packet.hook == Hook::Output => Value::NotLoopback,
        Meta::InName | Meta::OutName | Meta::SocketUser | Meta::SocketGroup => Value::Unknown,
    }
}

fn load_payload(base: Base, offset: u32, len: u32, packet: &Packet) -> Value {
    let destination = packet.destination.map(|destination| match destination {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    });
    match (base, offset, len) {
        (Base::Network, offset, len) if is_destination(offset, len, packet.family) => {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            destination.map_or(Value::Unknown, |bytes| {
                bytes
                    .get(..len)
                    .map_or(Value::Unknown, |it| Value::Known(it.to_vec()))
            })
        }
        (Base::Transport, 2, 2) => packet.port.map_or(Value::Unknown, |port| {
            Value::Known(port.to_be_bytes().into())
        }),
        (Base::Transport, 13, 1) => Value::Known(vec![TCP_SYN]),
        _ => Value::Unknown,
    }
}

/// Returns whether the bytes begin the destination address, as iptables compares networks of whole bytes.
fn is_destination(offset: u32, len: u32, family: Family) -> bool {
    let (start, length) = destination_of(family);
    offset == start && len <= length
}

fn masked(value: &Value, mask: &[u8], xor: &[u8]) -> Value {
    let Value::Known(bytes) = value else {
        return Value::Unknown;
    };
    if bytes.len() != mask.len() || bytes.len() != xor.len() {
        return Value::Unknown;
    }
    let masked = bytes.iter().zip(mask).zip(xor);
    let masked = masked.map(|((byte, mask), xor)| byte & mask ^ xor);
    Value::Known(masked.collect())
}

/// Returns whether the register equals the data, or begins with shorter data, and `None` if unknown.
fn compare(value: &Value, data: &[u8]) -> Option<bool> {
    match value {
        Value::Known(bytes) => Some(bytes.starts_with(data)),
        Value::NotLoopback => data.starts_with(b"lo\0").then_some(false),
        Value::Unknown => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Vec<u8> {
        [name.as_bytes(), &[0]].concat()
    }

    fn cmp(data: impl Into<Vec<u8>>) -> Op {
        Op::Cmp {
            equal: true,
            data: data.into(),
        }
    }

    fn port(number: u16) -> Vec<Op> {
        let load = Op::Payload {
            base: Base::Transport,
            offset: 2,
            len: 2,
        };
        vec![load, cmp(number.to_be_bytes()), Op::Accept]
    }

    fn by(meta: Meta, interface: &str) -> Vec<Op> {
        vec![
            Op::Meta(meta),
            cmp(name(interface)),
            Op::Counter,
            Op::Accept,
        ]
    }

    fn to_network(first: [u8; 2]) -> Vec<Op> {
        let load = Op::Payload {
            base: Base::Network,
            offset: 16,
            len: 2,
        };
        vec![load, cmp(first), Op::Accept]
    }

    /// Returns which of the packets the chain certainly drops: from the pod, by `lo`, onward, plaintext and HBONE.
    fn dropped(rules: &[Vec<Op>]) -> [bool; 5] {
        Packet::of_family(Family::V4).map(|packet| drops(rules, Policy::Drop, &packet))
    }

    #[test]
    fn a_kill_switch_drops_what_none_of_its_rules_accepts() {
        let established = vec![Op::Unknown(ESTABLISHED_MATCH.to_owned()), Op::Accept];
        let output = [by(Meta::OutName, "lo"), established.clone()];
        let [outbound, _, onward, ..] = dropped(&output);
        assert!(outbound && onward);
        let input = [by(Meta::InName, "lo"), established, port(9091)];
        let [_, looped, _, plaintext, hbone] = dropped(&input);
        assert_eq!([looped, plaintext, hbone], [false, true, true]);
        let open = [port(15001), port(15006), port(15008)];
        assert_eq!(dropped(&open), [false; 5]);
        assert!(!drops(
            &[],
            Policy::Accept,
            &Packet::of_family(Family::V4)[0]
        ));
    }

    #[test]
    fn a_rule_that_may_accept_is_no_drop() {
        let unknown = |name: &str| vec![Op::Unknown(name.to_owned()), Op::Accept];
        for rule in [
            unknown("match"),
            unknown("immediate"),
            by(Meta::OutName, "eth0"),
            vec![Op::Lookup("ports".to_owned()), Op::Accept],
            vec![Op::Accept],
            vec![Op::Meta(Meta::SocketUser), cmp([0; 4]), Op::Accept],
        ] {
            assert!(!dropped(std::slice::from_ref(&rule))[0], "{rule:?}");
        }
        let logs = vec![Op::Unknown("log".to_owned())];
        let may_drop = vec![Op::Unknown("limit".to_owned()), Op::Drop];
        assert!(dropped(&[logs, may_drop])[0]);
    }

    #[test]
    fn a_rule_for_another_destination_accepts_nothing_redirected() {
        let load = Op::Payload {
            base: Base::Network,
            offset: 16,
            len: 4,
        };
        let network = |equal, data: [u8; 4]| {
            let mask = Op::Bitwise {
                mask: vec![255, 255, 0, 0],
                xor: vec![0; 4],
            };
            let compare = Op::Cmp {
                equal,
                data: data.into(),
            };
            vec![load.clone(), mask, compare, Op::Accept]
        };
        assert!(dropped(&[network(true, [10, 77, 0, 0])])[0]);
        assert!(dropped(&[to_network([10, 77])])[0]);
        assert!(!dropped(&[network(false, [10, 77, 0, 0])])[0]);
        assert!(!dropped(&[network(true, [127, 0, 0, 0])])[0]);
    }
}
