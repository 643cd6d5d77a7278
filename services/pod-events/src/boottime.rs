//! Points in time that no clock change moves.

use std::{ops::Add, time::Duration};

use nix::time::{ClockId, clock_gettime};

/// A point in time, counted from the boot (`CLOCK_BOOTTIME`): what is remembered is of one boot, and a step of the
/// wall clock must neither end a sandbox early nor stretch a withdrawal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The boot: further back than any bound.
    pub const BOOT: Self = Self(Duration::ZERO);

    /// Now.
    pub fn now() -> Self {
        Self(clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from))
    }

    /// A moment some time after the boot.
    pub fn after_boot(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// The time since the boot.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// The time from an earlier moment to this one; nothing if it is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;

    fn add(self, wait: Duration) -> Self {
        Self(self.0 + wait)
    }
}
