//! A netns's packet filter and routes, within reach: sockets that were opened in it and are used from home.

use std::{fs, io};

use netns::{EnterError, Netns};

use crate::{
    netlink::KernelError,
    nftables::{Nftables, Observed, RuleBackend},
    routes::{Routes, Routing},
    rules::ambient::TABLES,
};

/// Whether IPv6 is switched off where it matters to us. Of the netns that the reading thread is in.
const DISABLE_IPV6: &str = "/proc/sys/net/ipv6/conf/lo/disable_ipv6";

/// Why a netns could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// It could not be entered.
    #[error("cannot reach into the netns")]
    Enter(#[from] EnterError),
    /// A netlink socket could not be opened in it.
    #[error("cannot open a netlink socket in the netns")]
    Socket(#[from] io::Error),
}

/// What is in a netns that could be ours.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) filter: Observed,
    pub(crate) routing: Routing,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Link<B = Nftables> {
    pub(crate) filter: B,
    pub(crate) routes: Routes,
    pub(crate) has_ipv6: bool,
}

impl Link {
    /// Does something through a link.
    pub(crate) fn with<T, E: From<ReachError>>(
        netns: &Netns,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut link = Self::open(netns)?;
        let result = work(&mut link);
        link.filter.close();
        result
    }

    /// Enters the netns for as long as it takes to open two sockets.
    fn open(netns: &Netns) -> Result<Self, ReachError> {
        let link = netns.within(|| {
            io::Result::Ok(Self {
                filter: Nftables::open()?,
                routes: Routes::open()?,
                has_ipv6: has_ipv6(),
            })
        })?;
        Ok(link?)
    }
}

impl<B: RuleBackend> Link<B> {
    /// Reads everything back.
    pub(crate) fn read(&mut self) -> Result<State, KernelError> {
        Ok(State {
            routing: self.routes.read()?,
            filter: self.filter.read(&TABLES)?,
        })
    }
}

/// A kernel without IPv6 has no such file. Where it cannot be read for another reason, trying tells.
fn has_ipv6() -> bool {
    match fs::read_to_string(DISABLE_IPV6) {
        Ok(text) => text.trim() != "1",
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}
