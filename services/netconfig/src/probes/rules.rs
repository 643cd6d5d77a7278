//! The node's table, as data.

use super::{selector::Selected, settings::ProbeSettings};
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

/// NF_IP_PRI_FILTER: after connection tracking and destination NAT.
const OUTPUT_PRIORITY: i32 = 0;

/// The conntrack label of connections from the cgroup's sockets, which postrouting cannot match. Not a mark, since
/// other tools route by marks. An arbitrary number.
const FROM_CGROUP: u8 = 105;

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

/// Packets of the selected sender to addresses in a set get the probe source address.
pub(crate) fn table(selected: &Selected, settings: &ProbeSettings) -> Table {
    let mut chains = vec![chain(
        "postrouting",
        (Kind::Nat, Hook::Postrouting, PRIORITY),
        Family::ALL.map(|family| snat_rule(selected, settings, family)),
    )];
    if let Selected::Cgroup(cgroup) = selected {
        let from = Expr::FromCgroup {
            level: cgroup.level,
            id: cgroup.id,
        };
        chains.push(chain(
            "output",
            (Kind::Filter, Hook::Output, OUTPUT_PRIORITY),
            Family::ALL.map(|family| label_rule(&from, family)),
        ));
    }
    Table {
        family: TableFamily::Inet,
        name: TABLE.to_owned(),
        chains,
    }
}

fn snat_rule(selected: &Selected, settings: &ProbeSettings, family: Family) -> Rule {
    let source = match family {
        Family::V4 => settings.source_v4.0.into(),
        Family::V6 => settings.source_v6.0.into(),
    };
    let selected = match selected {
        Selected::Socket => Expr::FromAnySocket,
        Selected::User(user) => Expr::FromUser(*user),
        Selected::Cgroup(_) => Expr::Labelled(FROM_CGROUP),
    };
    let [to, tcp] = to_pods(family);
    Rule(vec![
        to,
        tcp,
        selected,
        Expr::Counter,
        Expr::SourceNat(source),
    ])
}

fn label_rule(from: &Expr, family: Family) -> Rule {
    let [to, tcp] = to_pods(family);
    Rule(vec![
        to,
        tcp,
        Expr::NewConnection,
        from.clone(),
        Expr::Counter,
        Expr::Label(FROM_CGROUP),
    ])
}

fn to_pods(family: Family) -> [Expr; 2] {
    [
        Expr::DestinationIn(family, set_of(family).name.to_owned()),
        Expr::Protocol(Transport::Tcp),
    ]
}

fn chain(name: &str, (kind, hook, priority): (Kind, Hook, i32), rules: [Rule; 2]) -> Chain {
    Chain {
        name: name.to_owned(),
        base: Some(Base {
            kind,
            hook,
            priority,
            policy: Policy::Accept,
        }),
        rules: rules.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::selector::Cgroup, *};

    fn rendered(selected: &Selected) -> String {
        table(selected, &ProbeSettings::default()).to_string()
    }

    #[test]
    fn probes_of_any_socket_come_from_the_source_of_their_family() {
        assert_eq!(
            rendered(&Selected::Socket),
            "table inet inpod-host {\n\
             \tchain postrouting {\n\
             \t\ttype nat hook postrouting priority 99; policy accept;\n\
             \t\tip daddr @probes-v4 meta l4proto tcp meta skuid != 4294967295 counter \
             snat ip to 169.254.7.127\n\
             \t\tip6 daddr @probes-v6 meta l4proto tcp meta skuid != 4294967295 counter \
             snat ip6 to fd16:9254:7127:1337:ffff:ffff:ffff:ffff\n\
             \t}\n}\n"
        );
    }

    #[test]
    fn a_user_is_matched_where_packets_leave_and_a_cgroup_where_they_are_made() {
        assert!(rendered(&Selected::User(7)).contains(" meta skuid 7 counter snat ip to "));
        let cgroup = Cgroup {
            path: "a/b".to_owned(),
            level: 2,
            id: 9,
        };
        let text = rendered(&Selected::Cgroup(cgroup));
        assert!(text.contains("ct state new socket cgroupv2 level 2 9 counter ct label set 105"));
        assert!(text.contains("ct label 105 counter snat ip6 to "), "{text}");
    }
}
