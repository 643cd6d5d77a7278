//! The numbers that inpod and a ztunnel must agree on. ztunnel's are fixed in its source; Istio's node agent uses the
//! same (shared facts: services/docs/facts/istio-ambient.md, 1.8).

use std::fmt;

/// A packet's or connection's mark in the bits that are ours. Other bits belong to others and are never read or
/// written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    value: u32,
    mask: u32,
}

impl Mark {
    /// A value within its mask.
    pub(crate) const fn new(value: u32, mask: u32) -> Option<Self> {
        if value & !mask == 0 {
            Some(Self { value, mask })
        } else {
            None
        }
    }

    /// One of the numbers below; a test shows that they lie within the mask.
    const fn ours(value: u32) -> Self {
        Self {
            value,
            mask: OUR_BITS,
        }
    }

    /// The same value where every bit counts.
    pub(crate) const fn whole(self) -> Self {
        Self {
            value: self.value,
            mask: u32::MAX,
        }
    }

    /// The value.
    pub(crate) const fn value(self) -> u32 {
        self.value
    }

    /// Which bits count.
    pub(crate) const fn mask(self) -> u32 {
        self.mask
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

/// The bits of a mark that are ours.
const OUR_BITS: u32 = 0xfff;

/// On every packet that ztunnel sends itself: it must not be captured again. Set by ztunnel on its sockets.
pub(crate) const FROM_ZTUNNEL: Mark = Mark::ours(0x539);

/// On the connections that ztunnel opened to the application with the client's address, and on the replies, which
/// must go back to ztunnel by way of [`ZTUNNEL_TABLE`]. Set and read by our rules alone; the value is Istio's.
pub(crate) const TO_ZTUNNEL: Mark = Mark::ours(0x111);

/// On what a sidecar's proxy sends to the application in a client's name, and on the connections that it makes so. The
/// proxy sets it on its sockets (shared facts: services/docs/facts/istio-sidecar.md, 4.4.2).
pub(crate) const FROM_PROXY: Mark = Mark::ours(0x539);

/// On what is delivered to this netns for a sidecar's proxy by way of [`PROXY_TABLE`]. Istio has the one above for that
/// too; but what Istio's rules find it on they take for the proxy's, so that where they are still there beside ours a
/// client's connection would be taken for one to the application.
pub(crate) const TO_PROXY: Mark = Mark::ours(0x53b);

/// On what a sidecar's proxy sends within the pod, and TPROXY is to lead back to it (4.4.2).
pub(crate) const PROXY_TO_POD: Mark = Mark::ours(0x53a);

/// The route table that delivers everything to this netns, for a sidecar's proxy (4.4.2).
pub(crate) const PROXY_TABLE: u8 = 133;

/// In which zones of connection tracking a sidecar's proxy asks for names, and is asked for them (4.4.5).
pub(crate) const PROXY_DNS_ZONE: u16 = 1;
pub(crate) const APPLICATION_DNS_ZONE: u16 = 2;

/// Where ztunnel takes outbound connections, and a sidecar's proxy does.
pub(crate) const OUTBOUND_PORT: u16 = 15001;

/// Where ztunnel takes inbound connections in plaintext, and a sidecar's proxy all.
pub(crate) const INBOUND_PLAINTEXT_PORT: u16 = 15006;

/// Where ztunnel takes inbound connections from other ztunnels (HBONE).
pub(crate) const INBOUND_HBONE_PORT: u16 = 15008;

/// Where ztunnel answers names, over UDP and TCP, and a sidecar's proxy does.
pub(crate) const ZTUNNEL_DNS_PORT: u16 = 15053;

/// Where names are asked for.
pub(crate) const DNS_PORT: u16 = 53;

/// In which zone of connection tracking ztunnel's own questions are: the application's may come from the same port.
pub(crate) const ZTUNNEL_DNS_ZONE: u16 = 1;

/// Everything that ztunnel takes connections on.
pub(crate) const ZTUNNEL_PORTS: [u16; 3] =
    [OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, INBOUND_HBONE_PORT];

/// The route table that delivers everything to this netns, for ztunnel.
pub(crate) const ZTUNNEL_TABLE: u8 = 100;

/// The priority of the ip rule that leads there: before the tables main and default (32766, 32767).
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
