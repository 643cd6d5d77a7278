//! What Istio's node agent left is taken over, in each of the three forms in which it writes.

use netconfig::{Backend, Family, apply::Phase};

use crate::{
    support::{Fresh, ambient, sandbox},
    tools::{applied, differences, everything, feed, restore, saved, writer},
};

/// As it feeds it to `iptables-restore` (shared facts: istio-ambient.md, 6.2).
const IPTABLES: &str = "\
* mangle
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
* nat
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s 169.254.7.127 -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -d 169.254.7.127 -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
* raw
-N ISTIO_OUTPUT
-N ISTIO_PRERT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
";

/// What it gives to probes in IPv6.
const SNAT6: &str = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff";

/// As it feeds it to `nft -f` (6.3).
const NFTABLES: &str = "\
add table inet istio-ambient-nat ; flush table inet istio-ambient-nat
add chain inet istio-ambient-nat prerouting { type nat hook prerouting priority -100 ; }
add chain inet istio-ambient-nat output { type nat hook output priority -100 ; }
add chain inet istio-ambient-nat istio-prerouting
add chain inet istio-ambient-nat istio-output
add rule inet istio-ambient-nat output jump istio-output
add rule inet istio-ambient-nat prerouting jump istio-prerouting
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip saddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-prerouting ip daddr != 127.0.0.1/32 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-prerouting ip6 daddr != ::1/128 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-output oifname != lo mark and 0xfff != 0x539 udp dport 53 counter redirect to :15053
add rule inet istio-ambient-nat istio-output ip daddr != 127.0.0.1/32 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
add rule inet istio-ambient-nat istio-output ip6 daddr != ::1/128 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
add rule inet istio-ambient-nat istio-output meta l4proto tcp mark and 0xfff == 0x111 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip daddr != 127.0.0.1/32 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip6 daddr != ::1/128 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr != 127.0.0.1/32 mark and 0xfff != 0x539 counter redirect to :15001
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr != ::1/128 mark and 0xfff != 0x539 counter redirect to :15001
add table inet istio-ambient-mangle ; flush table inet istio-ambient-mangle
add chain inet istio-ambient-mangle prerouting { type filter hook prerouting priority -150 ; }
add chain inet istio-ambient-mangle output { type route hook output priority -150 ; }
add chain inet istio-ambient-mangle istio-prerouting
add chain inet istio-ambient-mangle istio-output
add rule inet istio-ambient-mangle output jump istio-output
add rule inet istio-ambient-mangle prerouting jump istio-prerouting
add rule inet istio-ambient-mangle istio-prerouting meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111
add rule inet istio-ambient-mangle istio-output ct mark and 0xfff == 0x111 counter meta mark set ct mark
add table inet istio-ambient-raw ; flush table inet istio-ambient-raw
add chain inet istio-ambient-raw prerouting { type filter hook prerouting priority -300 ; }
add chain inet istio-ambient-raw output { type filter hook output priority -300 ; }
add chain inet istio-ambient-raw istio-prerouting
add chain inet istio-ambient-raw istio-output
add rule inet istio-ambient-raw output jump istio-output
add rule inet istio-ambient-raw prerouting jump istio-prerouting
add rule inet istio-ambient-raw istio-output udp dport 53 meta mark and 0xfff == 0x539 counter ct zone set 1
add rule inet istio-ambient-raw istio-prerouting udp sport 53 meta mark and 0xfff != 0x539 counter ct zone set 1
";

/// A netns with what it leaves.
fn left_by_istio(form: Backend) -> Fresh {
    let fresh = Fresh::new();
    leave_as_istio(form, &fresh);
    fresh
}

/// Its routes and ip rules (6.1), then its rules in the form of a backend.
pub(crate) fn leave_as_istio(form: Backend, fresh: &Fresh) {
    for command in [
        "rule add fwmark 0x111/0xfff pref 32764 lookup 100",
        "route replace local 0.0.0.0/0 dev lo table 100",
        "-6 rule add fwmark 0x111/0xfff pref 32764 lookup 100",
        "-6 route replace local ::/0 dev lo table 100",
    ] {
        fresh.ip(command);
    }
    match form {
        Backend::Nftables => fresh.run(|| feed("nft", &["-f", "-"], NFTABLES)),
        Backend::IptablesNft | Backend::IptablesLegacy => {
            restore(fresh, form, Family::V4, IPTABLES);
            let v6 = IPTABLES
                .replace("127.0.0.1/32", "::1/128")
                .replace("169.254.7.127", SNAT6);
            restore(fresh, form, Family::V6, &v6);
        }
    }
}

#[test]
fn what_the_incumbent_left_is_replaced_and_afterwards_nothing_of_it_is_there() {
    for form in Backend::ALL {
        for backend in Backend::ALL {
            let nothing = everything(&Fresh::new());
            let fresh = left_by_istio(form);
            let told = differences(backend, &fresh).join("\n");
            let named = format!("left in {form}");
            let left =
                told.contains("Istio's node agent left") && told.contains(&format!(" in {form}"));
            assert!(left, "{named}: {told}");
            let applied_now = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert!(applied_now.unwrap().changed);
            let after = everything(&fresh);
            assert!(!after.to_lowercase().contains("istio"), "{after}");
            assert_eq!(after, everything(&applied(backend)), "{form} {backend}");
            assert_eq!(differences(backend, &fresh), [""; 0]);
            let removed = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
            removed.unwrap();
            assert_eq!(everything(&fresh), nothing, "{form} {backend}");
        }
    }
}

#[test]
fn what_the_incumbent_left_is_removed_where_nothing_was_applied() {
    for form in Backend::ALL {
        let nothing = everything(&Fresh::new());
        let fresh = left_by_istio(form);
        let removed = writer(Backend::Nftables).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        assert_eq!(everything(&fresh), nothing, "{form}");
    }
}

/// One that has lost some of its chains and jumps, and in whose tables others have theirs.
#[test]
fn what_is_left_of_the_incumbent_is_removed_and_chains_of_others_beside_it_stay() {
    for form in crate::tools::IPTABLES {
        let fresh = Fresh::new();
        let theirs = "*nat\n:THEIRS - [0:0]\n-A OUTPUT -p udp -j THEIRS\nCOMMIT\n";
        restore(&fresh, form, Family::V4, theirs);
        let before = everything(&fresh);
        let left = "*nat\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n\
            -A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n*raw\n:ISTIO_PRERT - [0:0]\nCOMMIT\n";
        restore(&fresh, form, Family::V4, left);
        let removed = writer(form).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        assert_eq!(everything(&fresh), before);
    }
}

/// As istio-init writes it, in part (istio-sidecar-install.md, 4.4.1).
#[test]
fn a_sidecars_chains_are_not_touched() {
    for form in crate::tools::IPTABLES {
        let fresh = Fresh::new();
        let sidecar = "*nat\n:ISTIO_INBOUND - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n\
            -A PREROUTING -p tcp -j ISTIO_INBOUND\n-A OUTPUT -j ISTIO_OUTPUT\n\
            -A ISTIO_OUTPUT -j ISTIO_REDIRECT\n-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";
        restore(&fresh, form, Family::V4, sidecar);
        let before = saved(&fresh, form, Family::V4);
        for backend in Backend::ALL {
            let applied = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert!(applied.unwrap().changed);
        }
        let removed = writer(form).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        let after = saved(&fresh, form, Family::V4);
        let rules = |saved: &str| -> Vec<String> {
            let rules = saved.lines().filter(|line| line.starts_with("-A"));
            rules.map(str::to_owned).collect()
        };
        assert_eq!(rules(&after), rules(&before));
    }
}
