use std::{ops::Add, time::Duration};

#[cfg(not(test))]
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A point in time since boot (`CLOCK_BOOTTIME`). Checkpoints are valid within one boot, and a step of the wall clock
/// must neither end a sandbox early nor prolong a withdrawal. Files contain milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The time of the boot, which counts as longer ago than any timeout.
    pub const BOOT: Self = Self(Duration::ZERO);

    pub fn now() -> Self {
        Self(since_boot())
    }

    pub fn after_boot(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

#[cfg(not(test))]
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// In tests, the boot time follows tokio's clock, which a test may pause.
#[cfg(test)]
use crate::testing::since_boot;

impl From<u64> for BootInstant {
    fn from(milliseconds: u64) -> Self {
        Self(Duration::from_millis(milliseconds))
    }
}

impl From<BootInstant> for u64 {
    fn from(at: BootInstant) -> Self {
        at.0.as_millis().try_into().unwrap_or(Self::MAX)
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;

    fn add(self, wait: Duration) -> Self {
        Self(self.0 + wait)
    }
}
