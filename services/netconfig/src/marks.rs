//! Marks, ports, tables and zones shared with ztunnel and with a sidecar's proxy. ztunnel's values are fixed in its
//! source; Istio's node agent uses the same values (services/docs/facts/istio-ambient.md, 1.8).

use std::{fmt, ops::RangeInclusive};

pub(crate) use inpod_types::redirection::{
    INBOUND_HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS,
};

/// A mark within inpod's bits, which are the only bits that inpod reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    value: u32,
    mask: u32,
}

impl Mark {
    /// Returns `None` if the value exceeds the mask.
    pub(crate) const fn new(value: u32, mask: u32) -> Option<Self> {
        if value & !mask == 0 {
            Some(Self { value, mask })
        } else {
            None
        }
    }

    /// Creates one of inpod's marks without a check, so that marks can be constants; a test checks all values
    /// against the mask.
    const fn ours(value: u32) -> Self {
        Self {
            value,
            mask: OUR_BITS,
        }
    }

    /// Returns the mark with a mask of all bits, so that the whole value is compared.
    pub(crate) const fn whole(self) -> Self {
        Self {
            value: self.value,
            mask: u32::MAX,
        }
    }

    /// Returns whether a packet with this mark and no other bit matches a condition on these bits.
    pub(crate) const fn matches(self, condition: Self) -> bool {
        self.mask & condition.mask != 0 && self.meets(condition)
    }

    /// Returns whether a packet with this mark and no other bit meets a condition, which may be about other bits.
    pub(crate) const fn meets(self, condition: Self) -> bool {
        self.value & condition.mask == condition.value
    }

    pub(crate) const fn value(self) -> u32 {
        self.value
    }

    pub(crate) const fn mask(self) -> u32 {
        self.mask
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

const OUR_BITS: u32 = 0xfff;

/// The mark on ztunnel's sockets, whose packets must not be captured again.
pub(crate) const FROM_ZTUNNEL: Mark = Mark::ours(0x539);

/// The mark on connections that ztunnel opens to the application from the client's address, and on their replies,
/// which return to ztunnel through a routing table of inpod. Only inpod's rules use the mark; the value is Istio's.
pub(crate) const TO_ZTUNNEL: Mark = Mark::ours(0x111);

/// The mark on sockets of a sidecar's proxy that connect to the application from a client's address
/// (services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const FROM_PROXY: Mark = Mark::ours(0x539);

/// The mark on packets that a routing table of inpod delivers to a sidecar's proxy. Istio uses [`FROM_PROXY`] instead, and
/// its rules treat every packet with [`FROM_PROXY`] as the proxy's: where Istio's rules still exist, a client's
/// connection would be mistaken for the proxy's connection to the application.
pub(crate) const TO_PROXY: Mark = Mark::ours(0x53b);

/// The mark on packets from a sidecar's proxy to the pod that TPROXY returns to the proxy
/// (services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const PROXY_TO_POD: Mark = Mark::ours(0x53a);

/// Zones of DNS queries from and to a sidecar's proxy (services/docs/facts/istio-sidecar.md, 4.4.5).
pub(crate) const PROXY_DNS_ZONE: u16 = 1;
pub(crate) const APPLICATION_DNS_ZONE: u16 = 2;

pub(crate) const DNS_PORT: u16 = 53;

/// The zone of ztunnel's own DNS queries, since the application's queries may use the same source port.
pub(crate) const ZTUNNEL_DNS_ZONE: u16 = 1;

/// The routing tables that inpod may use in a pod. Nothing else reads the numbers, so inpod uses the first tables that
/// no other program uses: even numbers for ztunnel, odd ones for a sidecar's proxy. The range avoids the tables that CNI
/// plugins, VPNs and Istio choose (services/docs/decisions/101-own-routing-table.md).
pub(crate) const TABLES: RangeInclusive<u32> = 10_500..=10_627;

/// The highest priority number of inpod's ip rules in a pod. inpod takes a smaller number where a foreign rule could
/// take the same packets before.
pub(crate) const RULE_PRIORITY: u32 = 500;

/// The priority of the main table's ip rule (fib_default_rules_init in net/ipv4/fib_rules.c).
pub(crate) const MAIN_RULE_PRIORITY: u32 = 0x7ffe;

/// The routing tables and the priority of Istio's node agent and Istio's sidecar installer, and of releases of inpod up
/// to 0.1 (services/docs/facts/istio-ambient.md, 1.8; services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const ISTIO_ZTUNNEL_TABLE: u32 = 100;
pub(crate) const ISTIO_PROXY_TABLE: u32 = 133;
pub(crate) const ISTIO_RULE_PRIORITY: u32 = 32764;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_marks_lie_within_their_mask() {
        for mark in [FROM_ZTUNNEL, TO_ZTUNNEL, FROM_PROXY, TO_PROXY, PROXY_TO_POD] {
            assert_eq!(Mark::new(mark.value(), mark.mask()), Some(mark));
        }
    }

    #[test]
    fn a_value_outside_its_mask_is_no_mark() {
        assert_eq!(Mark::new(0x1000, 0xfff), None);
    }
}
