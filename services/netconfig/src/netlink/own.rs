//! Recognizes notifications of netconfig's own changes, which netconfig reads back and need not read again.
//!
//! A notification repeats the number of the causing request (`nlmsg_seq`). netconfig records the numbers of a change
//! before sending the change, and the first notification with a number is netconfig's. Sockets number from a random
//! start, so no process can know a number before the kernel has sent netconfig's notification. A process that repeats a
//! number, or even netconfig's netlink port, only causes a second notification, and the second is foreign.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use inpod_types::NetnsId;
use nix::sys::socket::SockProtocol;
use parking_lot::Mutex;

/// The time after which a notification is no longer expected: the netns has no subscription, or the kernel has dropped
/// the notification.
const MAX_AGE: Duration = Duration::from_secs(10);

static EXPECTED: Mutex<Vec<Expected>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Expected {
    source: Source,
    numbers: RangeInclusive<u32>,
    since: Instant,
}

/// The origin of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) netns: NetnsId,
    pub(crate) protocol: SockProtocol,
}

/// Expects one notification of a change with the given numbers.
pub(super) fn expect(source: Source, numbers: RangeInclusive<u32>) {
    let mut expected = EXPECTED.lock();
    let now = Instant::now();
    expected.retain(|it| now.duration_since(it.since) < MAX_AGE);
    expected.push(Expected {
        source,
        numbers,
        since: now,
    });
}

/// Returns whether a notification was expected. No later notification with the same number is expected.
pub(crate) fn take(source: Source, number: u32) -> bool {
    let mut expected = EXPECTED.lock();
    let is_it = |it: &Expected| it.source == source && it.numbers.contains(&number);
    let found = expected.iter().position(is_it);
    found.map(|index| expected.swap_remove(index)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(inode: u64, protocol: SockProtocol) -> Source {
        let netns = NetnsId {
            device: 4,
            inode,
            cookie: 0,
        };
        Source { netns, protocol }
    }

    #[test]
    fn a_number_is_taken_once_and_only_from_its_source() {
        let filter = source(u64::MAX, SockProtocol::NetlinkNetFilter);
        expect(filter, 7..=9);
        assert!(!take(filter, 6));
        assert!(!take(source(u64::MAX, SockProtocol::NetlinkRoute), 8));
        assert!(!take(source(u64::MAX - 1, filter.protocol), 8));
        assert!(take(filter, 8));
        assert!(!take(filter, 8));
    }
}
