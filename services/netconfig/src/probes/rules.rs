//! The node's table, as data.

use super::settings::ProbeSettings;
use crate::{
    family::Family,
    nftables::AddressSet,
    rules::{Base, Chain, Expr, Hook, Kind, Policy, Rule, SCHEMA, Table, TableFamily, Transport},
};

/// inpod's only table in the node's netns.
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

/// Just before the usual priority of source NAT (NF_IP_PRI_NAT_SRC, 100; also iptables' nat table). A connection's
/// first NAT decision is final, and a foreign masquerade would hide the source of probes. With equal priority, the
/// last registered chain would win.
const PRIORITY: i32 = 99;

/// Identifies the table's owner and schema.
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

/// Packets of the sender to addresses in a set get the probe source address.
pub(crate) fn table(sender: &Expr, settings: &ProbeSettings) -> Table {
    let rule = |family| {
        let source = match family {
            Family::V4 => settings.source_v4.0.into(),
            Family::V6 => settings.source_v6.0.into(),
        };
        Rule(vec![
            Expr::DestinationIn(family, set_of(family).name.to_owned()),
            Expr::Protocol(Transport::Tcp),
            sender.clone(),
            Expr::Counter,
            Expr::SourceNat(source),
        ])
    };
    let base = Base {
        kind: Kind::Nat,
        hook: Hook::Postrouting,
        priority: PRIORITY,
        policy: Policy::Accept,
    };
    Table {
        family: TableFamily::Inet,
        name: TABLE.to_owned(),
        chains: vec![Chain {
            name: "postrouting".to_owned(),
            base: Some(base),
            rules: Family::ALL.map(rule).into(),
        }],
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
                     \t}}\n}}\n"
                )
            );
        }
    }
}
