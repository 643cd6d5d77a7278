//! The state of Istio's node agent in a pod with both families and DNS capture, in each form of its rules
//! (services/docs/facts/istio-ambient.md, 6.1 to 6.3).

use crate::support::Fresh;

/// The forms of Istio's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Tables of its own, by `nft`.
    Nft,
    /// Chains in the tables of iptables-nft.
    Iptables,
}

impl Form {
    pub(crate) const ALL: [Self; 2] = [Self::Nft, Self::Iptables];
}

/// Created over netlink (6.1).
const ROUTING: [&str; 4] = [
    "rule add fwmark 0x111/0xfff pref 32764 lookup 100",
    "route replace local 0.0.0.0/0 dev lo table 100",
    "-6 rule add fwmark 0x111/0xfff pref 32764 lookup 100",
    "-6 route replace local ::/0 dev lo table 100",
];

/// The input of `iptables-restore` (6.2).
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

/// Its IPv4 addresses, and their IPv6 counterparts.
const OF_IPV6: [(&str, &str); 2] = [
    ("127.0.0.1/32", "::1/128"),
    ("169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
];

/// The input of `nft -f` (6.3).
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

pub(crate) fn leave(form: Form, fresh: &Fresh) {
    for command in ROUTING {
        fresh.ip(command);
    }
    restore_rules(form, fresh);
}

/// Leaves rules only.
pub(crate) fn restore_rules(form: Form, fresh: &Fresh) {
    if form == Form::Nft {
        fresh.nft(NFTABLES);
        return;
    }
    let v6 = OF_IPV6
        .iter()
        .fold(IPTABLES.to_owned(), |rules, (v4, v6)| rules.replace(v4, v6));
    restore(fresh, [IPTABLES, &v6]);
}

/// Adds rules of IPv4 and of IPv6 by iptables-nft.
pub(crate) fn restore(fresh: &Fresh, rules: [&str; 2]) {
    let programs = ["iptables-nft-restore", "ip6tables-nft-restore"];
    for (program, rules) in programs.into_iter().zip(rules) {
        let script = format!("{program} --noflush <<'END'\n{rules}END");
        fresh.command("sh", &["-c", &script]);
    }
}
