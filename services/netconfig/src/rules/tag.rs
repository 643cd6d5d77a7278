use std::{fmt, str::FromStr};

use workload::SandboxRef;

use super::{Fingerprint, SCHEMA};

/// The kernel keeps at most 255 bytes of a comment, its end included (nftnl's udata has one length byte).
const LONGEST_SANDBOX: usize = 160;

/// What our tables carry as their comment, so that a netns says itself what was applied to it and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// How the rules are written.
    pub schema: u32,
    /// Which rules they are.
    pub fingerprint: Fingerprint,
    /// For whom they were written. For people: a sandbox may be renamed while its rules stay.
    pub sandbox: String,
}

impl Tag {
    /// The tag of rules that are written now.
    pub fn new(fingerprint: Fingerprint, sandbox: &SandboxRef) -> Self {
        let text = sandbox.to_string();
        let sandbox = if text.len() <= LONGEST_SANDBOX {
            text
        } else {
            format!("long-name-{}", Fingerprint::of(&text))
        };
        Self {
            schema: SCHEMA,
            fingerprint,
            sandbox,
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            schema,
            fingerprint,
            sandbox,
        } = self;
        write!(
            f,
            "inpod schema={schema} fingerprint={fingerprint} sandbox={sandbox}"
        )
    }
}

/// A comment that is not of our making.
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
    let (fingerprint, sandbox) = rest.split_once(" sandbox=")?;
    Some(Tag {
        schema: schema.parse().ok()?,
        fingerprint: fingerprint.parse().ok()?,
        sandbox: sandbox.to_owned(),
    })
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
        Tag::new(Fingerprint::of("x"), &sandbox)
    }

    #[test]
    fn a_tag_survives_the_way_through_its_text() {
        let tag = tag("c1");
        assert_eq!(tag.to_string().parse(), Ok(tag));
    }

    #[test]
    fn the_longest_sandbox_fits_into_a_comment() {
        let text = tag(&"c".repeat(253)).to_string();
        assert!(text.len() < 255, "{text}");
    }

    #[test]
    fn a_foreign_comment_is_no_tag() {
        assert_eq!("istio".parse::<Tag>(), Err(ForeignComment));
        assert_eq!("inpod schema=x".parse::<Tag>(), Err(ForeignComment));
    }
}
