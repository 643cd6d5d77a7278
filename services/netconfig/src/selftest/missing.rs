//! Names the option missing in a kernel that refuses rules. Each table of a series needs one more option than the
//! previous table.

use inpod_linux::Netns;
use inpod_types::Reason;

use super::netns_with_loopback;
use crate::{
    error::{Failed, InspectError},
    kernel_option::{Part, chain, first_refused, write_and_delete},
    nftables::Nftables,
    rules::{Expr, Hook, Kind, Transport},
};

/// Returns the missing option if sock_diag is missing or the kernel refused something, in the latter case by writing
/// tables in a temporary netns.
pub(super) fn missing_option_here(failed: &Failed) -> Option<&'static str> {
    if failed
        .cause()
        .is_some_and(InspectError::is_missing_sock_diag)
    {
        return Some("CONFIG_INET_TCP_DIAG");
    }
    let netns = (failed.reason == Reason::KernelRefused).then(netns_with_loopback);
    missing_option(&netns?.ok()?)
}

/// Returns the first option that the kernel lacks, or `None` if the kernel has all options.
fn missing_option(netns: &Netns) -> Option<&'static str> {
    let opened = netns.within(Nftables::open).ok()?;
    let mut nftables = opened.ok();
    first_refused(parts(), |table| match &mut nftables {
        None => true,
        Some(nftables) => write_and_delete(nftables, table).is_err(),
    })
}

fn parts() -> [Part; 4] {
    let chain = |kind, rule| vec![chain(kind, Hook::Output, rule)];
    let redirect = [Expr::Protocol(Transport::Tcp), Expr::Redirect(15001)];
    [
        ("CONFIG_NF_TABLES_INET", Vec::new()),
        ("CONFIG_NFT_NAT", chain(Kind::Nat, Vec::new())),
        ("CONFIG_NFT_REDIR", chain(Kind::Nat, redirect.into())),
        (
            "CONFIG_NFT_CT",
            chain(Kind::Filter, vec![Expr::NewConnection]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::KernelError;

    #[test]
    fn the_option_is_that_of_the_first_table_that_is_refused() {
        let options = parts().map(|(option, _)| option);
        for (accepted, option) in options.into_iter().enumerate() {
            let mut seen = 0;
            let is_refused = |_| {
                seen += 1;
                seen > accepted
            };
            assert_eq!(first_refused(parts(), is_refused), Some(option));
        }
        assert_eq!(first_refused(parts(), |_| false), None);
    }

    #[test]
    fn a_kernel_without_sock_diag_lacks_its_option() {
        let missing = KernelError::new("read the sockets", nix::Error::ENOENT);
        let failed = InspectError::from(missing).into();
        assert_eq!(missing_option_here(&failed), Some("CONFIG_INET_TCP_DIAG"));
    }

    #[test]
    fn this_kernel_has_every_option() {
        let netns = netns_with_loopback().unwrap();
        assert_eq!(missing_option(&netns), None);
    }
}
