use std::{fmt, str::FromStr};

use inpod_types::SandboxRef;

use super::{Fingerprint, SCHEMA};

/// The maximum length of a sandbox's name in other comments, which have at most 255 bytes with the terminating zero
/// (nftnl's udata has one length byte).
const MAX_NAME_BYTES: usize = 160;

/// The maximum length of a sandbox in a tag. nft loads no comment above 128 bytes (NFTNL_UDATA_COMMENT_MAXLEN of
/// libnftnl), and an operator has to be able to load the saved ruleset of a pod. Earlier releases wrote longer tags.
const MAX_SANDBOX_BYTES: usize = 35;

/// The number of characters that a shortened sandbox has of its container id, by which `crictl` finds the sandbox.
const ID_CHARS: usize = 18;

/// The comment on inpod's tables, which records in the netns the applied rules and their sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    pub schema: u32,
    pub fingerprint: Fingerprint,
    /// True if inpod enabled `net.ipv4.tcp_migrate_req` for these rules, and therefore has to disable the sysctl
    /// with them.
    pub migrates: bool,
    /// The ports that inpod added to `net.ipv4.ip_local_reserved_ports`, and therefore has to remove with the rules.
    pub reserved: Vec<u16>,
    /// The sandbox's name, for display only, because a sandbox may be renamed while its rules stay.
    pub sandbox: String,
}

const MIGRATES: &str = " switched=tcp_migrate_req";

/// Follows the sandbox, because earlier releases take everything after `sandbox=` for the name.
const PORTS: &str = " ports=";

/// Comments have no room for whole numbers: ` ports=1,53` stands for 15001 and 15053.
const FIRST_PORT: u16 = 15000;

impl Tag {
    pub fn new(fingerprint: Fingerprint, migrates: bool, sandbox: &SandboxRef) -> Self {
        Self {
            schema: SCHEMA,
            fingerprint,
            migrates,
            reserved: Vec::new(),
            sandbox: short_name(sandbox),
        }
    }
}

/// Returns the name of a sandbox, or the start of the container id and a hash of the name if the name is too long.
fn short_name(sandbox: &SandboxRef) -> String {
    let text = sandbox.to_string();
    if text.len() <= MAX_SANDBOX_BYTES {
        return text;
    }
    let id = sandbox.container_id.as_str().chars();
    let id: String = id.take(ID_CHARS).collect();
    format!("{id}-{}", Fingerprint::of(&text))
}

/// Returns the name of a sandbox for a kernel comment, or a hash of the name if the name is too long.
pub(crate) fn sandbox_name(sandbox: &SandboxRef) -> String {
    let text = sandbox.to_string();
    if text.len() <= MAX_NAME_BYTES {
        text
    } else {
        format!("long-name-{}", Fingerprint::of(&text))
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            schema,
            fingerprint,
            migrates,
            reserved,
            sandbox,
        } = self;
        let migrates = if *migrates { MIGRATES } else { "" };
        write!(
            f,
            "inpod schema={schema} fingerprint={fingerprint}{migrates} sandbox={sandbox}"
        )?;
        for (i, port) in reserved.iter().enumerate() {
            let before = if i == 0 { PORTS } else { "," };
            write!(f, "{before}{}", port.saturating_sub(FIRST_PORT))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignComment;

impl FromStr for Tag {
    type Err = ForeignComment;

    fn from_str(text: &str) -> Result<Self, ForeignComment> {
        parse(text).ok_or(ForeignComment)
    }
}

fn parse(text: &str) -> Option<Tag> {
    let rest = text.strip_prefix("inpod schema=")?;
    let (schema, rest) = rest.split_once(" fingerprint=")?;
    let (rest, sandbox) = rest.split_once(" sandbox=")?;
    let (sandbox, reserved) = split_reserved(sandbox).unwrap_or((sandbox, Vec::new()));
    let without = rest.strip_suffix(MIGRATES);
    let fingerprint = without.unwrap_or(rest);
    Some(Tag {
        schema: schema.parse().ok()?,
        fingerprint: fingerprint.parse().ok()?,
        migrates: without.is_some(),
        reserved,
        sandbox: sandbox.to_owned(),
    })
}

fn split_reserved(text: &str) -> Option<(&str, Vec<u16>)> {
    let (sandbox, ports) = text.rsplit_once(PORTS)?;
    let port = |text: &str| FIRST_PORT.checked_add(text.parse().ok()?);
    let ports = ports.split(',').map(port).collect::<Option<_>>();
    Some((sandbox, ports?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(container_id: &str) -> Tag {
        let sandbox = SandboxRef {
            network_name: "net".parse().unwrap(),
            container_id: container_id.parse().unwrap(),
            ifname: "eth0".parse().unwrap(),
        };
        Tag {
            reserved: vec![15001, 15006, 15008, 15053],
            ..Tag::new(Fingerprint::of("x"), true, &sandbox)
        }
    }

    #[test]
    fn a_tag_survives_the_way_through_its_text() {
        let migrates = tag("c1");
        assert_eq!(migrates.to_string().parse(), Ok(migrates.clone()));
        let tag = Tag {
            migrates: false,
            reserved: Vec::new(),
            ..migrates
        };
        assert_eq!(tag.to_string().parse(), Ok(tag));
    }

    #[test]
    fn the_tag_of_the_first_schema_is_understood() {
        let tag: Tag = "inpod schema=1 fingerprint=3717c2e820bb1348 sandbox=net/c1/eth0"
            .parse()
            .unwrap();
        assert_eq!((tag.schema, tag.migrates), (1, false));
    }

    #[test]
    fn nft_loads_the_tag_of_the_longest_sandbox() {
        for length in [26, 27, 64, 253] {
            let text = tag(&"c".repeat(length)).to_string();
            assert!(text.len() <= 128, "{text}");
        }
    }

    #[test]
    fn tags_of_two_long_sandboxes_differ() {
        let [one, other] = ["a", "b"].map(|end| tag(&("c".repeat(63) + end)).sandbox);
        assert_ne!(one, other);
        assert!(one.starts_with(&"c".repeat(ID_CHARS)), "{one}");
    }

    #[test]
    fn a_foreign_comment_is_no_tag() {
        assert_eq!("istio".parse::<Tag>(), Err(ForeignComment));
        assert_eq!("inpod schema=x".parse::<Tag>(), Err(ForeignComment));
    }
}
