//! Packets' expected destination, computed without rules.

use std::net::{IpAddr, SocketAddr};

use netconfig::{
    Family,
    rules::{InboundCapture, Ipv6, Network, Selection},
};

use super::{
    super::{
        mesh::{AT_LOOPBACK, AT_THE_POD, returning},
        settings::{UNHEARD, WIDE_LOOPBACK},
    },
    Checks,
};
use crate::packets::{
    checks::{answer, question},
    probe::{Dial, Evidence, Owner, Transport},
    stand_in::By,
    world::{INTERFACES, either, guest, loopback, pod},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Direct,
    Outbound,
    Inbound,
    Names,
}

impl Checks<'_> {
    pub(super) fn is_captured(&self) -> bool {
        self.captures && (self.family == Family::V4 || self.settings.ipv6 != Ipv6::Off)
    }

    pub(super) fn is_tproxied(&self) -> bool {
        self.is_captured()
            && self.settings.inbound_capture == InboundCapture::Tproxy
            && self.settings.inbound_ports != Selection::default()
    }

    pub(super) fn wanted(&self, owner: Owner, dial: &Dial) -> Evidence {
        let Dial { to, transport, .. } = *dial;
        let is_within = to.ip().is_loopback() || to.ip() == pod(self.family);
        let source = dial.from.unwrap_or_else(|| self.source(to.ip()));
        let outcome = if self.is_captured() {
            self.outcome(owner, dial, is_within)
        } else {
            Outcome::Direct
        };
        let by = match outcome {
            Outcome::Direct if is_within => By::Application,
            Outcome::Direct => By::Outside,
            Outcome::Outbound => By::Ztunnel(15001),
            Outcome::Inbound => By::Ztunnel(15006),
            Outcome::Names => By::Ztunnel(15053),
        };
        let is_heard = match to.port() {
            AT_THE_POD => to.ip() == pod(self.family),
            AT_LOOPBACK => to.ip() == loopback(self.family),
            port if UNHEARD.contains(&port) => false,
            _ => true,
        };
        if by == By::Application && !is_heard {
            return Evidence::Refused(std::io::ErrorKind::ConnectionRefused);
        }
        let on = match by {
            By::Application | By::Outside => to.port(),
            // TPROXY does not change the address.
            By::Ztunnel(15006) if self.is_led_by_tproxy(owner) => to.port(),
            By::Ztunnel(port) => port,
        };
        match transport {
            Transport::Tcp => answer(by, on, source, to),
            Transport::Udp => question(by, on, source),
        }
    }

    pub(super) fn is_led_by_tproxy(&self, owner: Owner) -> bool {
        self.settings.inbound_capture == InboundCapture::Tproxy && !self.is_proxys_user(owner)
    }

    /// The source that the kernel selects.
    pub(super) fn source(&self, to: IpAddr) -> IpAddr {
        let names = INTERFACES.iter();
        let by_guest = names
            .into_iter()
            .position(|name| guest(self.family, name) == to);
        match by_guest {
            Some(number) => either(
                self.family,
                &format!("10.200.{number}.1"),
                &format!("fd20:0:0:{number}::1"),
            ),
            None if to.is_loopback() => loopback(self.family),
            None => pod(self.family),
        }
    }

    pub(super) fn is_proxys_user(&self, owner: Owner) -> bool {
        let users = &self.settings.proxy_users;
        users
            .iter()
            .any(|user| user.to_string() == owner.user.to_string())
    }

    pub(super) fn is_proxy(&self, owner: Owner) -> bool {
        self.is_proxys_user(owner) || has_group(&self.settings.proxy_groups, owner)
    }

    pub(super) fn outcome(&self, owner: Owner, dial: &Dial, is_within: bool) -> Outcome {
        let settings = self.settings;
        let (to, is_tcp) = (dial.to, dial.transport == Transport::Tcp);
        let port = to.port();
        let is_excluded = settings
            .excluded_outbound_ports
            .iter()
            .any(|excluded| excluded.get() == port);
        let is_by_excluded = INTERFACES.into_iter().any(|name| {
            let excluded = &settings.excluded_interfaces;
            guest(self.family, name) == to.ip()
                && excluded.iter().any(|excluded| excluded.as_str() == name)
        });
        if is_within && dial.from == Some(returning(self.family)) {
            return Outcome::Direct;
        }
        let is_excluded = is_excluded && !(is_within && self.is_led_by_mark(owner));
        if is_excluded || is_by_excluded {
            return Outcome::Direct;
        }
        if self.is_proxy(owner) {
            return self.fate_of_proxy(owner, to, is_tcp && is_within);
        }
        let included = settings.owner_groups.as_ref();
        if has_group(&settings.excluded_owner_groups, owner)
            || included.is_some_and(|included| !has_group(included, owner))
        {
            return Outcome::Direct;
        }
        if port == 53 && self.is_server(to.ip()) {
            return Outcome::Names;
        }
        if is_tcp && self.is_outbound(to, is_within) {
            return Outcome::Outbound;
        }
        Outcome::Direct
    }

    pub(super) fn fate_of_proxy(
        &self,
        owner: Owner,
        to: SocketAddr,
        is_tcp_within: bool,
    ) -> Outcome {
        let asks_for_names = to.port() == 53 && self.has_names();
        if !is_tcp_within || self.is_loopback(to.ip()) || to.port() == 15008 {
            Outcome::Direct
        } else if self.is_led_by_mark(owner) {
            // Reaches the proxy as from outside.
            if self.is_inbound_port(to.port()) {
                Outcome::Inbound
            } else {
                Outcome::Direct
            }
        } else if asks_for_names {
            Outcome::Direct
        } else {
            Outcome::Inbound
        }
    }

    /// With TPROXY, the proxy group's traffic to the pod is routed as from outside.
    pub(super) fn is_led_by_mark(&self, owner: Owner) -> bool {
        let by_tproxy = self.settings.inbound_capture == InboundCapture::Tproxy;
        by_tproxy && self.is_proxy(owner) && !self.is_proxys_user(owner)
    }

    pub(super) fn has_names(&self) -> bool {
        let is_excluded = |port: &std::num::NonZeroU16| port.get() == 53;
        !self
            .settings
            .excluded_outbound_ports
            .iter()
            .any(is_excluded)
            && match &self.settings.dns {
                Selection::All => true,
                Selection::These(servers) => servers
                    .iter()
                    .any(|server| server.is_ipv4() == (self.family == Family::V4)),
            }
    }

    pub(super) fn is_server(&self, address: IpAddr) -> bool {
        self.has_names()
            && match &self.settings.dns {
                Selection::All => true,
                Selection::These(servers) => servers.contains(&address),
            }
    }

    pub(super) fn is_loopback(&self, address: IpAddr) -> bool {
        let is_wide = self.settings.loopback == WIDE_LOOPBACK.parse().unwrap();
        address == loopback(self.family) || (is_wide && holds(WIDE_LOOPBACK, address))
    }

    pub(super) fn is_outbound(&self, to: SocketAddr, is_within: bool) -> bool {
        let settings = self.settings;
        let networks = match &settings.outbound_networks {
            Selection::All => None,
            Selection::These(networks) => Some(networks),
        };
        let is_in = |networks: &[_], address| {
            let mut networks = networks.iter();
            networks.any(|network: &Network| holds(&network.to_string(), address))
        };
        let mut texts = networks.into_iter().flatten().map(ToString::to_string);
        let includes_loopback = texts.any(|text| text.starts_with("127."));
        if (is_within && !includes_loopback)
            || self.is_loopback(to.ip())
            || is_in(&settings.excluded_outbound_networks, to.ip())
        {
            return false;
        }
        networks.is_none_or(|networks| is_in(networks, to.ip()))
            || settings
                .outbound_ports
                .iter()
                .any(|port| port.get() == to.port())
    }

    pub(super) fn is_inbound_port(&self, port: u16) -> bool {
        let excluded = &self.settings.excluded_inbound_ports;
        port != 15008
            && match &self.settings.inbound_ports {
                Selection::All => !excluded.iter().any(|excluded| excluded.get() == port),
                Selection::These(ports) => ports.iter().any(|wanted| wanted.get() == port),
            }
    }

    pub(super) fn is_of_networks(&self, address: IpAddr) -> bool {
        match &self.settings.outbound_networks {
            Selection::All => true,
            Selection::These(networks) => networks
                .iter()
                .any(|network| holds(&network.to_string(), address)),
        }
    }
}

fn has_group(groups: &[netconfig::rules::Owner], owner: Owner) -> bool {
    let mut groups = groups.iter();
    groups.any(|group| group.to_string() == owner.group.to_string())
}

fn holds(network: &str, address: IpAddr) -> bool {
    let (base, length) = network.split_once('/').unwrap_or((network, ""));
    let base: IpAddr = base.parse().unwrap();
    let bits = |address: IpAddr| match address {
        IpAddr::V4(v4) => (u128::from(u32::from(v4)) << 96, 32),
        IpAddr::V6(v6) => (u128::from(v6), 128),
    };
    let ((base_bits, whole), (own, _)) = (bits(base), bits(address));
    let length: u32 = length.parse().unwrap_or(whole);
    base.is_ipv4() == address.is_ipv4() && (base_bits ^ own).leading_zeros() >= length
}
