//! Selects the destination and the source address of the probe for each family.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use nix::ifaddrs::getifaddrs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    /// Returns the destination of redirected packets of local processes (nf_nat_redirect.c).
    pub fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }

    fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// Each family in which the pod has an external address.
    Auto,
    Only(Family),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTarget {
    pub family: Family,
    /// The destination address of the probe, which is local to the pod but neither 127.0.0.1 nor ::1.
    pub address: IpAddr,
}

impl ProbeTarget {
    /// Returns the source address, which must not be the address that Istio's rules exclude as the proxy's own. A
    /// loopback address would do, but the kernel's reset of a connection from `::1` to an address of another interface
    /// is lost: tcp_v6_send_response uses the interface on which the packet arrived, and `::1` is not there (measured).
    pub fn source(&self) -> IpAddr {
        if self.address == INBOUND_V4 || self.address == INBOUND_V6 {
            self.family.loopback()
        } else {
            self.address
        }
    }

    pub fn socket_addr(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address, port)
    }
}

/// Envoy connects within its pod from these addresses, known to Istio's rules (services/docs/facts/istio-sidecar.md,
/// 7.2). All of 127.0.0.0/8 is local to `lo`; `::6` exists only where the address was added for the rules.
const INBOUND_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
const INBOUND_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6));

pub fn local_addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = getifaddrs().map_err(io::Error::from)?;
    let address = |storage: nix::sys::socket::SockaddrStorage| {
        let v4 = storage.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| storage.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    Ok(interfaces.filter_map(|it| address(it.address?)).collect())
}

/// Returns a target for each family to validate.
///
/// # Errors
///
/// Fails if the pod has no address of any wanted family.
pub fn select(wanted: Families, addresses: &[IpAddr]) -> Result<Vec<ProbeTarget>, String> {
    let has = |family| external_addresses(addresses, family).next().is_some();
    let families: Vec<_> = match wanted {
        Families::Only(family) => vec![family],
        Families::Auto => [Family::V4, Family::V6]
            .into_iter()
            .filter(|it| has(*it))
            .collect(),
    };
    if families.is_empty() {
        return Err(
            "this pod has no address except loopback: nothing can be redirected yet".to_owned(),
        );
    }
    let target = |family| ProbeTarget {
        family,
        address: target_address(addresses, family),
    };
    Ok(families.into_iter().map(target).collect())
}

/// Returns the destination address. Connections to any local address leave through `lo`, so another address will do if
/// `::6` does not exist.
fn target_address(addresses: &[IpAddr], family: Family) -> IpAddr {
    match family {
        Family::V4 => INBOUND_V4,
        Family::V6 if addresses.contains(&INBOUND_V6) => INBOUND_V6,
        Family::V6 => external_addresses(addresses, family)
            .next()
            .unwrap_or(INBOUND_V6),
    }
}

/// Returns the addresses by which other hosts can reach the pod.
fn external_addresses(addresses: &[IpAddr], family: Family) -> impl Iterator<Item = IpAddr> {
    let is_external = move |address: &IpAddr| {
        let is_local = match address {
            IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified(),
            IpAddr::V6(v6) => {
                v6.is_loopback() || v6.is_unicast_link_local() || *address == INBOUND_V6
            }
        };
        Family::of(*address) == family && !is_local
    };
    addresses.iter().copied().filter(is_external)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(wanted: Families, addresses: &[&str]) -> Result<Vec<(Family, String)>, String> {
        let addresses: Vec<_> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let targets = select(wanted, &addresses)?;
        Ok(targets
            .iter()
            .map(|target| (target.family, target.address.to_string()))
            .collect())
    }

    const V4: (Family, &str) = (Family::V4, "127.0.0.6");

    fn owned(targets: &[(Family, &str)]) -> Result<Vec<(Family, String)>, String> {
        Ok(targets
            .iter()
            .map(|(it, at)| (*it, (*at).to_owned()))
            .collect())
    }

    #[test]
    fn what_a_pod_has_an_address_of_has_to_be_redirected() {
        let auto = |addresses: &[&str]| found(Families::Auto, addresses);
        let v6 = (Family::V6, "::6");
        assert_eq!(
            auto(&["127.0.0.1", "::1", "fe80::1", "10.0.0.7"]),
            owned(&[V4])
        );
        assert_eq!(auto(&["127.0.0.1", "::1", "::6", "fd00::7"]), owned(&[v6]));
        assert_eq!(auto(&["10.0.0.7", "::6", "fd00::7"]), owned(&[V4, v6]));
        assert_eq!(
            auto(&["10.0.0.7", "::6", "::1"]),
            owned(&[V4]),
            "::6 is ours"
        );
        let none = auto(&["127.0.0.1", "::1", "fe80::1", "169.254.0.1"]);
        assert!(none.unwrap_err().contains("no address"));
    }

    #[test]
    fn without_the_usual_address_an_address_of_the_pod_is_used() {
        let targets = found(Families::Auto, &["fe80::1", "fd00::7", "fd00::8"]);
        assert_eq!(targets, owned(&[(Family::V6, "fd00::7")]));
    }

    #[test]
    fn a_family_that_is_named_is_probed_whatever_the_pod_has() {
        let only = |family| found(Families::Only(family), &["10.0.0.7"]);
        assert_eq!(only(Family::V6), owned(&[(Family::V6, "::6")]));
        assert_eq!(only(Family::V4), owned(&[V4]));
    }
}
