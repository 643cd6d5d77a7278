//! The state of Istio's sidecar installer in a pod with both families, in each form of its rules
//! (services/docs/facts/istio-sidecar.md, 4.3 to 4.8).

use crate::{
    istio::{Form, restore},
    support::Fresh,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// REDIRECT with all DNS queries (4.4.1 and 4.4.5).
    Redirect,
    /// TPROXY for inbound TCP, an excluded interface, invalid packets dropped (4.4.2, 4.4.4 and 4.4.6).
    Tproxy,
}

impl Left {
    pub(crate) const ALL: [Self; 2] = [Self::Redirect, Self::Tproxy];
}

const OUTPUT: &str = "\
-A ISTIO_OUTPUT -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_OUTPUT -p udp -m udp --dport 15020 -j RETURN
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_OUTPUT_DNS -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
COMMIT
* raw
-N ISTIO_INBOUND
-N ISTIO_OUTPUT_DNS
-A PREROUTING -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_INBOUND -p udp -m udp --sport 53 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --gid-owner 1337 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --sport 15053 -m owner --gid-owner 1337 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -j CT --zone 2
COMMIT
";

const NAT: &str = "\
* nat
-N ISTIO_INBOUND
-N ISTIO_REDIRECT
-N ISTIO_IN_REDIRECT
-N ISTIO_OUTPUT
-N ISTIO_OUTPUT_DNS
";

const INBOUND: &str = "\
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
";

const ORPHANED: &str = "\
-A PREROUTING -i not-istio-nic -j RETURN
-A OUTPUT -o not-istio-nic -j RETURN
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
";

const MANGLE: &str = "\
* mangle
-N ISTIO_DIVERT
-N ISTIO_INBOUND
-N ISTIO_TPROXY
-N ISTIO_DROP
-A PREROUTING -i not-istio-nic -j RETURN
-A OUTPUT -o not-istio-nic -j RETURN
-A PREROUTING -m conntrack --ctstate INVALID -j ISTIO_DROP
-A ISTIO_DROP -j DROP
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A PREROUTING -p tcp -m mark --mark 0x539 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff
-A OUTPUT -o lo -p tcp -m mark --mark 0x539 -j RETURN
-A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 1337 -j MARK --set-xmark 0x53a/0xffffffff
-A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --gid-owner 1337 -j MARK --set-xmark 0x53a/0xffffffff
-A OUTPUT -p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
-A ISTIO_DIVERT -j MARK --set-xmark 0x539/0xffffffff
-A ISTIO_DIVERT -j ACCEPT
-A ISTIO_INBOUND -p tcp -m mark --mark 0x539 -j RETURN
-A ISTIO_INBOUND -s 127.0.0.6/32 -i lo -p tcp -j RETURN
-A ISTIO_INBOUND -i lo -p tcp -m mark ! --mark 0x53a -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY
-A ISTIO_TPROXY ! -d 127.0.0.1/32 -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff
COMMIT
";

/// Its IPv4 addresses, and their IPv6 counterparts.
const OF_IPV6: [(&str, &str); 3] = [
    ("127.0.0.1/32", "::1/128"),
    ("127.0.0.6/32", "::6/128"),
    ("--on-ip 0.0.0.0", "--on-ip ::"),
];

const NFT_NAT: &str = "\
table inet istio-proxy-nat {
 chain istio-redirect { meta l4proto tcp counter redirect to :15001; }
 chain istio-in-redirect { meta l4proto tcp counter redirect to :15006; }
 chain istio-output-dns { tcp dport 53 counter redirect to :15053; udp dport 53 counter redirect to :15053; }
 chain istio-output {
  tcp dport 15020 counter return; udp dport 15020 counter return
  oifname lo ip saddr 127.0.0.6 counter return; oifname lo ip6 saddr ::6 counter return
  oifname lo ip daddr != 127.0.0.1 tcp dport != { 53, 15008 } meta skuid 1337 counter jump istio-in-redirect
  oifname lo ip6 daddr != ::1 tcp dport != { 53, 15008 } meta skuid 1337 counter jump istio-in-redirect
  oifname lo tcp dport != 53 meta skuid != 1337 counter return
  meta skuid 1337 counter return
  oifname lo ip daddr != 127.0.0.1 tcp dport != 15008 meta skgid 1337 counter jump istio-in-redirect
  oifname lo ip6 daddr != ::1 tcp dport != 15008 meta skgid 1337 counter jump istio-in-redirect
  oifname lo tcp dport != 53 meta skgid != 1337 counter return
  meta skgid 1337 counter return
  counter jump istio-output-dns
  ip daddr 127.0.0.1 counter return; ip6 daddr ::1 counter return
  counter jump istio-redirect
 }
 chain output { type nat hook output priority -100; policy accept; counter jump istio-output; }
";

const NFT_INBOUND: &str = "\
 chain istio-inbound {
  tcp dport 15008 counter return; tcp dport 15020 counter return
  tcp dport 15021 counter return; tcp dport 15090 counter return
  meta l4proto tcp counter jump istio-in-redirect
 }
 chain prerouting { type nat hook prerouting priority -100; policy accept; meta l4proto tcp counter jump istio-inbound; }
";

const NFT_RAW: &str = "\
}
table inet istio-proxy-raw {
 chain istio-inbound { udp sport 53 counter ct zone set 1; }
 chain istio-output-dns {
  udp dport 53 meta skuid 1337 counter ct zone set 1; udp sport 15053 meta skuid 1337 counter ct zone set 2
  udp dport 53 meta skgid 1337 counter ct zone set 1; udp sport 15053 meta skgid 1337 counter ct zone set 2
  udp dport 53 counter ct zone set 2
 }
 chain prerouting { type filter hook prerouting priority -300; policy accept; counter jump istio-inbound; }
 chain output { type filter hook output priority -300; policy accept; counter jump istio-output-dns; }
}
";

const NFT_MANGLE: &str = "\
table inet istio-proxy-mangle {
 chain istio-drop { counter drop; }
 chain istio-divert { meta mark set 1337 counter; counter accept; }
 chain istio-tproxy {
  ip daddr != 127.0.0.1 meta l4proto tcp tproxy ip to :15006 meta mark set 1337 counter accept
  ip6 daddr != ::1 meta l4proto tcp tproxy ip6 to :15006 meta mark set 1337 counter accept
 }
 chain istio-inbound {
  meta l4proto tcp mark 1337 counter return
  iifname lo ip6 saddr ::6 meta l4proto tcp counter return
  iifname lo meta l4proto tcp mark != 1338 counter return
  iifname lo ip saddr 127.0.0.6 meta l4proto tcp counter return
  tcp dport 15020 counter return; tcp dport 15021 counter return; tcp dport 15090 counter return
  meta l4proto tcp ct state established,related counter jump istio-divert
  meta l4proto tcp counter jump istio-tproxy
 }
 chain prerouting {
  type filter hook prerouting priority -150; policy accept
  iifname not-istio-nic counter return
  meta l4proto tcp ct state invalid counter jump istio-drop
  meta l4proto tcp counter jump istio-inbound
  meta l4proto tcp mark 1337 counter ct mark set mark
 }
 chain output {
  type route hook output priority -150; policy accept
  oifname not-istio-nic counter return
  oifname lo meta l4proto tcp mark 1337 counter return
  oifname lo ip daddr != 127.0.0.1 meta l4proto tcp skuid 1337 counter meta mark set 1338
  oifname lo ip6 daddr != ::1 meta l4proto tcp skuid 1337 counter meta mark set 1338
  oifname lo ip daddr != 127.0.0.1 meta l4proto tcp skgid 1337 counter meta mark set 1338
  oifname lo ip6 daddr != ::1 meta l4proto tcp skgid 1337 counter meta mark set 1338
  meta l4proto tcp ct mark 1337 counter meta mark set ct mark
 }
}
";

/// Creates routes, ip rules and address, then rules in a form. Each start of the installer adds its
/// ip rule once more.
pub(crate) fn leave(form: Form, left: Left, fresh: &Fresh) {
    fresh.ip("-6 addr add ::6/128 dev lo");
    if left == Left::Tproxy {
        for family in ["-4", "-6"] {
            // The installer gives no priority.
            for _ in 0..2 {
                fresh.ip(&format!("{family} rule add fwmark 1337 lookup 133"));
            }
            fresh.ip(&format!(
                "{family} route add local default dev lo table 133"
            ));
        }
    }
    if form == Form::Nft {
        fresh.nft(&native(left));
        return;
    }
    let v4 = match left {
        Left::Redirect => [NAT, INBOUND, OUTPUT].concat(),
        Left::Tproxy => [MANGLE, NAT, ORPHANED, OUTPUT].concat(),
    };
    let v6 = OF_IPV6
        .iter()
        .fold(v4.clone(), |rules, (v4, v6)| rules.replace(v4, v6));
    restore(fresh, [&v4, &v6]);
}

fn native(left: Left) -> String {
    match left {
        Left::Redirect => [NFT_NAT, NFT_INBOUND, NFT_RAW].concat(),
        Left::Tproxy => [NFT_NAT, NFT_RAW, NFT_MANGLE].concat(),
    }
}
