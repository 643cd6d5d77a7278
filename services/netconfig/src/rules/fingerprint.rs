use std::{fmt, str::FromStr};

/// The 64-bit FNV-1a hash of a ruleset's text, which is stable across builds unlike std's hasher. Detects drift,
/// not malice: a process able to write the tag is able to write the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn of(text: &str) -> Self {
        const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        Self(text.bytes().fold(BASIS, mix))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for Fingerprint {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with published test vectors (draft-eastlake-fnv).
    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(Fingerprint::of("").to_string(), "cbf29ce484222325");
        assert_eq!(Fingerprint::of("foobar").to_string(), "85944171f73967e8");
    }

    #[test]
    fn its_text_leads_back() {
        let fingerprint = Fingerprint::of("x");
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
    }
}
