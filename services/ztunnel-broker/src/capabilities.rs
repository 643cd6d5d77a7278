//! Capabilities of a process, in procfs and the settings.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Deserializer, de::Error as _};

/// The names in linux/capability.h up to Linux 6.18, without `CAP_`, indexed by bit. None was added since Linux 5.9.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Parses the permitted set (capabilities(7)) of `/proc/<pid>/status`.
    pub fn permitted(status: &str) -> Option<Self> {
        let text = status.lines().find_map(|line| line.strip_prefix("CapPrm:"));
        u64::from_str_radix(text?.trim(), 16).ok().map(Self)
    }

    fn named(name: &str) -> Result<Self, String> {
        let found = (0_u32..).zip(NAMES).find(|(_, known)| *known == name);
        let (bit, _) = found.ok_or_else(|| {
            format!(
                "setting ztunnel_capabilities: \"{name}\" is not a capability; expected a name such as NET_ADMIN"
            )
        })?;
        Ok(Self(1 << bit))
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for bit in (0..u64::BITS).filter(|bit| self.0 >> bit & 1 == 1) {
            f.write_str(between)?;
            let name = usize::try_from(bit).ok().and_then(|bit| NAMES.get(bit));
            match name {
                Some(name) => f.write_str(name)?,
                None => write!(f, "number {bit}")?,
            }
            between = ", ";
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredCapabilities {
    Exactly(Capabilities),
    Any,
}

impl RequiredCapabilities {
    /// Describes how `found` differs; `None` without a difference.
    pub fn difference(self, found: Capabilities) -> Option<String> {
        let Self::Exactly(wanted) = self else {
            return None;
        };
        let (more, less) = (found.without(wanted), wanted.without(found));
        let mut text = String::new();
        if more != Capabilities(0) {
            write!(text, "has too many: {more}").unwrap_or_default();
        }
        if less != Capabilities(0) {
            let between = if text.is_empty() { "" } else { "; " };
            write!(text, "{between}has too few: it lacks {less}").unwrap_or_default();
        }
        (!text.is_empty()).then_some(text)
    }

    fn of(names: &[String]) -> Result<Self, String> {
        if names == ["any"] {
            return Ok(Self::Any);
        }
        if names.is_empty() {
            return Err(
                "setting ztunnel_capabilities: no capability is named; use any to accept every set"
                    .to_owned(),
            );
        }
        let mut all = Capabilities(0);
        for name in names {
            all.0 |= Capabilities::named(name)?.0;
        }
        Ok(Self::Exactly(all))
    }
}

/// A list of names, or `any`.
impl<'de> Deserialize<'de> for RequiredCapabilities {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let names: Vec<String> = inpod_service::list(deserializer)?;
        Self::of(&names).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn required(text: &str) -> Result<RequiredCapabilities, String> {
        let names: Vec<_> = text.split(',').map(str::to_owned).collect();
        RequiredCapabilities::of(&names)
    }

    /// The three capabilities; `capsh --decode=0000000000203000` prints the same.
    const ZTUNNEL: &str = "Name:\tztunnel\nCapInh:\t0000000000000000\nCapPrm:\t0000000000203000\n";

    #[test]
    fn what_istios_chart_gives_ztunnel_is_what_is_demanded_by_default() {
        let wanted = required("NET_ADMIN,NET_RAW,SYS_ADMIN").unwrap();
        let found = Capabilities::permitted(ZTUNNEL).unwrap();
        assert_eq!(wanted, RequiredCapabilities::Exactly(found));
        assert_eq!(wanted.difference(found), None);
    }

    #[test]
    fn a_difference_lists_what_is_too_many_and_too_few() {
        let wanted = required("NET_ADMIN,NET_RAW,SYS_ADMIN").unwrap();
        let difference = |bits| wanted.difference(Capabilities(bits)).unwrap();
        assert_eq!(
            difference(0),
            "has too few: it lacks NET_ADMIN, NET_RAW, SYS_ADMIN"
        );
        assert_eq!(difference(0x0020_3001), "has too many: CHOWN");
        assert_eq!(
            difference(1 << 50 | 0x3000),
            "has too many: number 50; has too few: it lacks SYS_ADMIN"
        );
        assert!(difference(u64::MAX).contains("CHECKPOINT_RESTORE, number 41"));
    }

    #[test]
    fn any_is_content_with_everything() {
        assert_eq!(required("any").unwrap(), RequiredCapabilities::Any);
        assert_eq!(
            RequiredCapabilities::Any.difference(Capabilities(u64::MAX)),
            None
        );
    }

    #[test]
    fn a_wrong_name_is_an_error_that_names_it_and_the_setting() {
        for text in [
            "NET_ADMIN,NET_RAWW",
            "CAP_NET_ADMIN",
            "net_admin",
            "any,NET_RAW",
            "",
            "all",
        ] {
            let error = required(text).unwrap_err();
            let wrong = text.split(',').find(|name| !NAMES.contains(name)).unwrap();
            assert!(error.contains("ztunnel_capabilities"), "{error}");
            assert!(error.contains(&format!("\"{wrong}\"")), "{text}: {error}");
        }
        assert!(
            RequiredCapabilities::of(&[])
                .unwrap_err()
                .contains("ztunnel_capabilities")
        );
    }

    #[test]
    fn each_name_stands_at_its_bit() {
        for (bit, name) in [
            (0, "CHOWN"),
            (12, "NET_ADMIN"),
            (13, "NET_RAW"),
            (21, "SYS_ADMIN"),
            (34, "SYSLOG"),
            (40, "CHECKPOINT_RESTORE"),
        ] {
            assert_eq!(Capabilities::named(name), Ok(Capabilities(1 << bit)));
        }
    }

    #[test]
    fn a_status_without_a_permitted_set_is_not_parsed() {
        for status in [
            "",
            "CapPrm:\t\n",
            "CapPrm:\tmany\n",
            "CapEff:\t0000000000203000\n",
        ] {
            assert_eq!(Capabilities::permitted(status), None, "{status}");
        }
    }
}
