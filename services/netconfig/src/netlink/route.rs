//! Numbers of routes and ip rules (rtnetlink(7)), and how they are read.

use netlink_bindings::traits::NetlinkRequest;

use super::{KernelError, Socket};

/// Who made a route or an ip rule: a number of our own among those free for use (rtnetlink(7), "rtm_protocol"; the
/// well-known ones stand in /etc/iproute2/rt_protos). By it ours are told from equal ones of others, which are not ours
/// to delete, and known again after a restart.
pub(crate) const PROTOCOL: u8 = 105;

/// RTN_UNICAST and RTN_LOCAL of linux/rtnetlink.h.
pub(crate) const TYPE_UNICAST: u8 = 1;
pub(crate) const TYPE_LOCAL: u8 = 2;

/// RT_SCOPE_UNIVERSE of linux/rtnetlink.h: the only one IPv6 has.
pub(crate) const SCOPE_UNIVERSE: u8 = 0;
/// RT_SCOPE_LINK and RT_SCOPE_HOST of linux/rtnetlink.h.
pub(crate) const SCOPE_LINK: u8 = 253;
pub(crate) const SCOPE_HOST: u8 = 254;

/// FR_ACT_TO_TBL (linux/fib_rules.h): an ip rule leads to a table.
pub(crate) const TO_TABLE: u8 = 1;

/// How often a dump is begun again because things came and went meanwhile.
const ATTEMPTS: usize = 8;

impl Socket {
    /// As [`Socket::dump`], of the routes or ip rules of a family, and again where others change them meanwhile. A
    /// kernel without IPv6 does not know the family, and there is nothing of it.
    pub(crate) fn dump_family<R: NetlinkRequest>(
        &mut self,
        act: &str,
        request: &R,
    ) -> Result<Vec<Vec<u8>>, KernelError> {
        let mut attempts = ATTEMPTS;
        loop {
            attempts -= 1;
            match self.dump(act, request) {
                Err(error) if error.is_race() && attempts > 0 => {}
                Err(error) if error.is(nix::Error::EAFNOSUPPORT) => return Ok(Vec::new()),
                result => return result,
            }
        }
    }
}
