//! Finds rules of Istio's sidecar installer in iptables' tables (services/docs/facts/istio-sidecar.md, 4.3 and 4.4).

use super::save::{SavedRule, SavedTable};

/// The installer's. The node agent has one named like the second.
const CHAINS: [&str; 8] = [
    "ISTIO_INBOUND",
    "ISTIO_OUTPUT",
    "ISTIO_REDIRECT",
    "ISTIO_IN_REDIRECT",
    "ISTIO_OUTPUT_DNS",
    "ISTIO_DIVERT",
    "ISTIO_TPROXY",
    "ISTIO_DROP",
];

/// Returns the installer's chains, without those of the node agent.
pub(super) fn chains<'a>(saved: &'a SavedTable, incumbent: &[&str]) -> Vec<&'a str> {
    let chains = saved.chains.iter().map(String::as_str);
    chains
        .filter(|chain| CHAINS.contains(chain) && !incumbent.contains(chain))
        .collect()
}

/// Returns the installer's rules in built-in chains that do not jump to its chains. Valid only in a
/// family with its chains.
pub(super) fn standalone_rules(saved: &SavedTable) -> impl Iterator<Item = &SavedRule> {
    saved.rules.iter().filter(|rule| stands_alone(rule))
}

fn stands_alone(rule: &SavedRule) -> bool {
    let tokens: Vec<_> = rule.tokens.iter().map(String::as_str).collect();
    match rule.chain.as_str() {
        "PREROUTING" => matches!(
            tokens.as_slice(),
            // Excluded interfaces, virtual machines, marks for TPROXY.
            ["-i", _, "-j", "RETURN"]
                | [
                    "-p",
                    "tcp",
                    "-m",
                    "mark",
                    "--mark",
                    "0x539",
                    "-j",
                    "CONNMARK",
                    "--save-mark",
                    ..
                ]
        ),
        "OUTPUT" => matches!(
            tokens.as_slice(),
            ["-o", _, "-j", "RETURN"]
                | [
                    "-o", "lo", "-p", "tcp", "-m", "mark", "--mark", "0x539", "-j", "RETURN"
                ]
                | [
                    "!",
                    "-d",
                    _,
                    "-o",
                    "lo",
                    "-p",
                    "tcp",
                    "-m",
                    "owner",
                    "--uid-owner" | "--gid-owner",
                    _,
                    "-j",
                    "MARK",
                    "--set-xmark",
                    "0x53a/0xffffffff",
                ]
                | [
                    "-p",
                    "tcp",
                    "-m",
                    "connmark",
                    "--mark",
                    "0x539",
                    "-j",
                    "CONNMARK",
                    "--restore-mark",
                    ..
                ]
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::save::parse;

    /// The installer's, with TPROXY (services/docs/facts/istio-sidecar.md, 4.4.2), among rules of others.
    const MANGLE: &str = "*mangle\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:ISTIO_DIVERT - [0:0]\n\
        :THEIRS - [0:0]\n\
        -A PREROUTING -p tcp -j ISTIO_INBOUND\n\
        -A PREROUTING -p tcp -m mark --mark 0x539 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff\n\
        -A OUTPUT -o lo -p tcp -m mark --mark 0x539 -j RETURN\n\
        -A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 1337 -j MARK --set-xmark 0x53a/0xffffffff\n\
        -A OUTPUT -p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff\n\
        -A OUTPUT -p tcp -m connmark --mark 0x111 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff\n\
        -A OUTPUT -o eth1 -j RETURN\n\
        -A OUTPUT -o eth1 -p tcp -j RETURN\n\
        -A THEIRS -o eth1 -j RETURN\nCOMMIT\n";

    #[test]
    fn rules_that_stand_alone_are_told_from_those_of_others() {
        let tables = parse(MANGLE).unwrap();
        let found: Vec<_> = standalone_rules(&tables[0])
            .map(|rule| rule.text.as_str())
            .collect();
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(found.contains(&"OUTPUT -o eth1 -j RETURN"), "{found:?}");
        assert!(
            !found.iter().any(|rule| rule.contains("0x111")),
            "{found:?}"
        );
        assert_eq!(chains(&tables[0], &[]), ["ISTIO_DIVERT"]);
    }
}
