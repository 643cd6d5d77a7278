//! iptables' syntax of the rule, and the parser of iptables-save.

use std::net::IpAddr;

use super::{CHAIN, HOOK, set_of};
use crate::{
    family::Family,
    probes::{selector::Selected, settings::ProbeSettings},
};

/// Renders like iptables-save prints it.
pub(super) fn rule(selected: &Selected, settings: &ProbeSettings, family: Family) -> String {
    let matched = match selected {
        Selected::Socket => "-m owner --socket-exists".to_owned(),
        Selected::User(user) => format!("-m owner --uid-owner {user}"),
        Selected::Cgroup(cgroup) => format!("-m cgroup --path {}", quoted(&cgroup.path)),
    };
    let source: IpAddr = match family {
        Family::V4 => settings.source_v4.0.into(),
        Family::V6 => settings.source_v6.0.into(),
    };
    let set = set_of(family);
    format!("-A {CHAIN} -p tcp {matched} -m set --match-set {set} dst -j SNAT --to-source {source}")
}

/// Quotes like xtables_save_string of libxtables.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("\"{}\"", word.replace('\\', "\\\\"))
    }
}

/// Our chain as `iptables-save` prints it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Saved {
    pub(super) exists: bool,
    pub(super) rules: Vec<String>,
    /// In POSTROUTING, without conditions.
    pub(super) jumps: usize,
    /// POSTROUTING's first rule is such a jump.
    pub(super) is_first: bool,
}

impl Saved {
    pub(super) fn parse(text: &str) -> Self {
        let jump = format!("-A {HOOK} -j {CHAIN}");
        let of_chain = |chain: &str| {
            let start = format!("-A {chain} ");
            text.lines().filter(move |line| line.starts_with(&start))
        };
        let declared = format!(":{CHAIN} ");
        Self {
            exists: text.lines().any(|line| line.starts_with(&declared)),
            rules: of_chain(CHAIN).map(str::to_owned).collect(),
            jumps: of_chain(HOOK).filter(|line| *line == jump).count(),
            is_first: of_chain(HOOK).next() == Some(&jump),
        }
    }
}

/// Refills the chain and replaces all jumps to it by a first one, in one transaction.
pub(super) fn replacement_script(saved: &Saved, rule: &str) -> String {
    let delete = format!("-D {HOOK} -j {CHAIN}\n").repeat(saved.jumps);
    format!("*nat\n:{CHAIN} - [0:0]\n-F {CHAIN}\n{rule}\n{delete}-I {HOOK} 1 -j {CHAIN}\nCOMMIT\n")
}

/// Removes every jump, too, in one transaction.
pub(super) fn removal_script(saved: &Saved) -> String {
    let delete = format!("-D {HOOK} -j {CHAIN}\n").repeat(saved.jumps);
    format!("*nat\n{delete}-F {CHAIN}\n-X {CHAIN}\nCOMMIT\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probes::selector::Cgroup;

    #[test]
    fn a_rule_is_what_iptables_save_prints() {
        let rule = |selected: &Selected, family| rule(selected, &ProbeSettings::default(), family);
        assert_eq!(
            rule(&Selected::Socket, Family::V4),
            "-A INPOD_POSTRT -p tcp -m owner --socket-exists -m set --match-set inpod-probes-v4 dst \
             -j SNAT --to-source 169.254.7.127"
        );
        assert!(rule(&Selected::User(0), Family::V6).contains("--uid-owner 0 -m set --match-set"));
        let cgroup = |path: &str| {
            Selected::Cgroup(Cgroup {
                path: path.to_owned(),
                level: 1,
                id: 1,
            })
        };
        let text = rule(&cgroup("system.slice/kubelet.service"), Family::V4);
        assert!(
            text.contains(" --path system.slice/kubelet.service -m set "),
            "{text}"
        );
        let text = rule(&cgroup(r"a\x2db@1"), Family::V4);
        assert!(text.contains(r#" --path "a\\x2db@1" -m set "#), "{text}");
    }

    #[test]
    fn our_chain_is_found_among_others() {
        let text = "*nat\n:POSTROUTING ACCEPT [0:0]\n:INPOD_POSTRT - [0:0]\n\
                    -A POSTROUTING -j KUBE-POSTROUTING\n-A POSTROUTING -j INPOD_POSTRT\n\
                    -A INPOD_POSTRT -p tcp -j ACCEPT\n-A INPOD_POSTRTX -j ACCEPT\nCOMMIT\n";
        let saved = Saved::parse(text);
        assert_eq!(saved.rules, ["-A INPOD_POSTRT -p tcp -j ACCEPT"]);
        assert_eq!((saved.jumps, saved.is_first), (1, false));
        assert!(saved.exists);
        let other = text.replace(":INPOD_POSTRT ", ":INPOD_POSTRTX ");
        assert!(!Saved::parse(&other).exists);
    }

    #[test]
    fn a_chain_goes_after_every_jump_to_it() {
        let saved = Saved {
            exists: true,
            jumps: 2,
            ..Saved::default()
        };
        let text = removal_script(&saved);
        let lines: Vec<_> = text.lines().collect();
        let delete = "-D POSTROUTING -j INPOD_POSTRT";
        let expected = [
            "*nat",
            delete,
            delete,
            "-F INPOD_POSTRT",
            "-X INPOD_POSTRT",
            "COMMIT",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn jumps_from_elsewhere_give_way_to_the_first_one() {
        let saved = Saved {
            jumps: 2,
            ..Saved::default()
        };
        let text = replacement_script(&saved, "-A INPOD_POSTRT -j RETURN");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "*nat",
                ":INPOD_POSTRT - [0:0]",
                "-F INPOD_POSTRT",
                "-A INPOD_POSTRT -j RETURN",
                "-D POSTROUTING -j INPOD_POSTRT",
                "-D POSTROUTING -j INPOD_POSTRT",
                "-I POSTROUTING 1 -j INPOD_POSTRT",
                "COMMIT",
            ]
        );
    }
}
