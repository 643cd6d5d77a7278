use std::{fmt, ops::RangeInclusive, str::FromStr};

/// A set of ports, as the kernel lists ports in sysctls: `80,8000-8010`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports(Vec<RangeInclusive<u16>>);

impl Ports {
    pub(crate) fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }

    pub(crate) fn with(mut self, ports: &[u16]) -> Self {
        self.0.extend(ports.iter().map(|port| *port..=*port));
        self
    }

    pub(crate) fn without(self, ports: &[u16]) -> Self {
        ports.iter().fold(self, |rest, port| {
            let split = rest.0.into_iter().flat_map(|range| without(range, *port));
            Self(split.collect())
        })
    }
}

fn without(range: RangeInclusive<u16>, port: u16) -> impl Iterator<Item = RangeInclusive<u16>> {
    let (first, last) = range.into_inner();
    let below = (first..=last.min(port.saturating_sub(1)), first < port);
    let above = (first.max(port.saturating_add(1))..=last, last > port);
    let parts = [below, above].into_iter();
    parts.filter_map(|(part, is_there)| is_there.then_some(part))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPorts;

impl FromStr for Ports {
    type Err = NoPorts;

    fn from_str(text: &str) -> Result<Self, NoPorts> {
        let parts = text.trim().split(',').filter(|part| !part.is_empty());
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let port = |text: &str| text.parse::<u16>().map_err(|_| NoPorts);
            Ok(port(first)?..=port(last)?)
        };
        parts.map(range).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let (first, last) = (range.start(), range.end());
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(text: &str) -> Ports {
        text.parse().unwrap()
    }

    #[test]
    fn added_ports_leave_without_a_trace() {
        for (own, added, all) in [
            ("", &[15001, 15053][..], "15001,15053"),
            ("80,8000-8010", &[15001], "80,8000-8010,15001"),
            (
                "15002-15005,80",
                &[15001, 15006],
                "15002-15005,80,15001,15006",
            ),
        ] {
            let with = ports(own).with(added);
            assert_eq!(with.to_string(), all);
            assert_eq!(with.without(added).to_string(), own);
        }
    }

    #[test]
    fn a_port_is_taken_from_a_range_that_the_kernel_joined() {
        let left = |port: u16| ports("15001-15006\n").without(&[port]).to_string();
        assert_eq!(left(15001), "15002-15006");
        assert_eq!(left(15003), "15001-15002,15004-15006");
        assert_eq!(left(15006), "15001-15005");
        assert_eq!(left(15007), "15001-15006");
        assert_eq!(ports("7").without(&[7]).to_string(), "");
        assert_eq!(ports("0-65535").without(&[0, 65535]).to_string(), "1-65534");
    }

    #[test]
    fn other_text_is_no_set_of_ports() {
        assert_eq!("1-2-3".parse::<Ports>(), Err(NoPorts));
        assert_eq!("65536".parse::<Ports>(), Err(NoPorts));
    }
}
