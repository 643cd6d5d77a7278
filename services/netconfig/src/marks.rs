//! Marks, ports, tables and zones shared with ztunnel and with a sidecar's proxy. ztunnel's are fixed in its source;
//! Istio's node agent uses the same (services/docs/facts/istio-ambient.md, 1.8).

use std::fmt;

/// A mark within inpod's bits. Others are never read or written.
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

    /// Unchecked, to be a constant; a test checks all values against the mask.
    const fn ours(value: u32) -> Self {
        Self {
            value,
            mask: OUR_BITS,
        }
    }

    /// Returns the value, compared in all bits.
    pub(crate) const fn whole(self) -> Self {
        Self {
            value: self.value,
            mask: u32::MAX,
        }
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

/// On ztunnel's sockets: its packets must not be captured again.
pub(crate) const FROM_ZTUNNEL: Mark = Mark::ours(0x539);

/// On connections that ztunnel opens to the application from the client's address, and on their replies, which return
/// through [`ZTUNNEL_TABLE`]. Only our rules use it; the value is Istio's.
pub(crate) const TO_ZTUNNEL: Mark = Mark::ours(0x111);

/// On sockets of a sidecar's proxy that speak to the application from a
/// client's address (services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const FROM_PROXY: Mark = Mark::ours(0x539);

/// On packets that [`PROXY_TABLE`] delivers to a sidecar's proxy. Not [`FROM_PROXY`] as in Istio, whose rules
/// take every packet with that mark for the proxy's: where they still exist, a client's connection would be taken
/// for one to the application.
pub(crate) const TO_PROXY: Mark = Mark::ours(0x53b);

/// On packets from a sidecar's proxy to the pod that TPROXY returns to
/// the proxy (services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const PROXY_TO_POD: Mark = Mark::ours(0x53a);

/// Delivers everything locally, for a sidecar's proxy (services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const PROXY_TABLE: u8 = 133;

/// Zones of DNS queries from and to a sidecar's proxy (services/docs/facts/istio-sidecar.md, 4.4.5).
pub(crate) const PROXY_DNS_ZONE: u16 = 1;
pub(crate) const APPLICATION_DNS_ZONE: u16 = 2;

/// ztunnel's and a sidecar's, for outbound connections.
pub(crate) const OUTBOUND_PORT: u16 = 15001;

/// ztunnel's for inbound plaintext; a sidecar's for everything inbound.
pub(crate) const INBOUND_PLAINTEXT_PORT: u16 = 15006;

/// For connections from other ztunnels (HBONE).
pub(crate) const INBOUND_HBONE_PORT: u16 = 15008;

/// ztunnel's and a sidecar's, UDP and TCP.
pub(crate) const ZTUNNEL_DNS_PORT: u16 = 15053;

pub(crate) const DNS_PORT: u16 = 53;

/// For ztunnel's own queries: the application's may use the same source port.
pub(crate) const ZTUNNEL_DNS_ZONE: u16 = 1;

pub(crate) const ZTUNNEL_PORTS: [u16; 3] =
    [OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, INBOUND_HBONE_PORT];

/// Delivers everything locally, for ztunnel.
pub(crate) const ZTUNNEL_TABLE: u8 = 100;

/// Before the ip rules for tables main and default (32766, 32767).
pub(crate) const RULE_PRIORITY: u32 = 32764;

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
