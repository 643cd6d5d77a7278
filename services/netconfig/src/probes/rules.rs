//! The node's tables, as data.

use super::settings::ProbeSettings;
use crate::{
    family::Family,
    nftables::AddressSet,
    rules::{
        Base, Chain, Expr, Hook, Kind, Network, Policy, Rule, SCHEMA, Table, TableFamily, Transport,
    },
};

/// The name of inpod's two tables in the node's netns, of the families inet and bridge.
pub(crate) const TABLE: &str = "inpod-host";

pub(crate) const SETS: [AddressSet; 2] = [
    AddressSet {
        table: TABLE,
        name: "probes-v4",
        family: Family::V4,
    },
    AddressSet {
        table: TABLE,
        name: "probes-v6",
        family: Family::V6,
    },
];

/// The priority just before the usual priority of source NAT (NF_IP_PRI_NAT_SRC, 100; also iptables' nat table). A
/// connection's first NAT decision is final, and a foreign masquerade would hide the source of probes. With equal
/// priority, the last registered chain would win.
const PRIORITY: i32 = 99;

/// The priority before connection tracking and, in the bridge, before any other program's rules (NF_IP_PRI_RAW,
/// NF_BR_PRI_NAT_DST_BRIDGED).
const FIRST_PRIORITY: i32 = -300;

/// The EtherTypes of VLAN tags (ETH_P_8021Q and ETH_P_8021AD of linux/if_ether.h).
const VLAN_TAGS: [u16; 2] = [0x8100, 0x88a8];

/// Returns the comment of inpod's tables, which names the owner and the schema.
pub(crate) fn tag() -> String {
    format!("inpod schema={SCHEMA} probes of the node")
}

pub(crate) fn set_of(family: Family) -> AddressSet {
    let [v4, v6] = SETS;
    match family {
        Family::V4 => v4,
        Family::V6 => v6,
    }
}

/// Returns the table of family inet. Packets of the sender to addresses in a set get the probe source address. Arriving
/// packets from the probe source address are dropped: the node's own packets only leave, so a pod has forged the address.
pub(crate) fn table(sender: &Expr, settings: &ProbeSettings) -> Table {
    let mark = |family| {
        Rule(vec![
            Expr::DestinationIn(family, set_of(family).name.to_owned()),
            Expr::Protocol(Transport::Tcp),
            sender.clone(),
            Expr::Counter,
            Expr::SourceNat(settings.source(family)),
        ])
    };
    let refuse = |family| {
        let forged = Expr::Source(Network::host(settings.source(family)));
        Rule(vec![forged, Expr::Counter, Expr::Drop])
    };
    let leaving = (Kind::Nat, Hook::Postrouting, PRIORITY);
    table_of(
        TableFamily::Inet,
        vec![
            chain("postrouting", leaving, Family::ALL.map(mark).into()),
            chain("prerouting", ARRIVING, Family::ALL.map(refuse).into()),
        ],
    )
}

/// Returns the table that drops the same packets between two ports of a bridge, where tables of family inet see no
/// packets. The kernel of a pod ignores any number of tags of VLAN 0, and a bridge with `vlan_filtering` removes the
/// first tag, whatever its VLAN. A rule sees only the packet below at most one tag, so frames with a second tag of VLAN 0
/// are dropped (services/docs/facts/kernel.md, 24).
pub(crate) fn bridge_table(settings: &ProbeSettings) -> Table {
    let forged = Family::ALL.map(|family| Expr::FrameFrom(settings.source(family)));
    let hidden = VLAN_TAGS.map(Expr::FrameTagged);
    let drop = |frames| Rule(vec![frames, Expr::Counter, Expr::Drop]);
    let rules = forged.into_iter().chain(hidden).map(drop).collect();
    table_of(
        TableFamily::Bridge,
        vec![chain("prerouting", ARRIVING, rules)],
    )
}

const ARRIVING: (Kind, Hook, i32) = (Kind::Filter, Hook::Prerouting, FIRST_PRIORITY);

fn table_of(family: TableFamily, chains: Vec<Chain>) -> Table {
    Table {
        family,
        name: TABLE.to_owned(),
        chains,
    }
}

fn chain(name: &str, (kind, hook, priority): (Kind, Hook, i32), rules: Vec<Rule>) -> Chain {
    Chain {
        name: name.to_owned(),
        base: Some(Base {
            kind,
            hook,
            priority,
            policy: Policy::Accept,
        }),
        rules,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::settings::ProbeMatch, *};

    #[test]
    fn probes_of_a_sender_come_from_the_source_of_their_family() {
        for (probe_match, sender) in [
            (ProbeMatch::Socket, "meta skuid != 4294967295"),
            (ProbeMatch::Uid(7), "meta skuid 7"),
        ] {
            let table = table(&probe_match.sender().unwrap(), &ProbeSettings::default());
            assert_eq!(
                table.to_string(),
                format!(
                    "table inet inpod-host {{\n\
                     \tchain postrouting {{\n\
                     \t\ttype nat hook postrouting priority 99; policy accept;\n\
                     \t\tip daddr @probes-v4 meta l4proto tcp {sender} counter \
                     snat ip to 169.254.7.127\n\
                     \t\tip6 daddr @probes-v6 meta l4proto tcp {sender} counter \
                     snat ip6 to fd16:9254:7127:1337:ffff:ffff:ffff:ffff\n\
                     \t}}\n\
                     \tchain prerouting {{\n\
                     \t\ttype filter hook prerouting priority -300; policy accept;\n\
                     \t\tip saddr 169.254.7.127 counter drop\n\
                     \t\tip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter drop\n\
                     \t}}\n}}\n"
                )
            );
        }
    }

    #[test]
    fn a_bridge_forwards_no_frame_from_the_sources_of_probes() {
        assert_eq!(
            bridge_table(&ProbeSettings::default()).to_string(),
            "table bridge inpod-host {\n\
             \tchain prerouting {\n\
             \t\ttype filter hook prerouting priority -300; policy accept;\n\
             \t\tmeta protocol ip ip saddr 169.254.7.127 counter drop\n\
             \t\tmeta protocol ip6 ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter drop\n\
             \t\t@nh,0,16 & 0x0fff == 0 meta protocol 0x8100 counter drop\n\
             \t\t@nh,0,16 & 0x0fff == 0 meta protocol 0x88a8 counter drop\n\
             \t}\n}\n"
        );
    }
}
