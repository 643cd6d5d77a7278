//! Finds options that the kernel lacks, by writing tables that need one option each into a temporary netns.

use inpod_linux::Netns;

use crate::{
    marks::FROM_ZTUNNEL,
    netlink::KernelError,
    nftables::{Change, NewTable, Nftables},
    rules::{Base, Chain, Expr, Hook, Kind, Policy, Rule, Table, TableFamily, Transport},
};

const NAME: &str = "inpod-options";

/// A kernel option, and the chains that need the option.
pub(crate) type Part = (&'static str, Vec<Chain>);

/// Returns the missing option if the kernel cannot refuse packets by the mark of the receiver. Any other refusal concerns
/// no option, and occurs again when a pod's rules are written.
pub(crate) fn missing_for_guard() -> Option<&'static str> {
    let netns = Netns::create().ok()?;
    let mut nftables = netns.within(Nftables::open).ok()?.ok()?;
    let is_missing = |table| {
        let refused = write_and_delete(&mut nftables, table).err();
        refused.is_some_and(|error| error.is(nix::Error::ENOENT))
    };
    let missing = first_refused(guard_parts(), is_missing);
    nftables.close();
    missing
}

fn guard_parts() -> [Part; 2] {
    let receiver = vec![Expr::ReceiverNotMarked(FROM_ZTUNNEL)];
    let refuse = vec![Expr::Protocol(Transport::Tcp), Expr::Refuse(Transport::Tcp)];
    [
        ("CONFIG_NFT_SOCKET", receiver),
        ("CONFIG_NFT_REJECT", refuse),
    ]
    .map(|(option, rule)| (option, vec![chain(Kind::Filter, Hook::Input, rule)]))
}

/// Returns the first option whose table is refused.
pub(crate) fn first_refused(
    parts: impl IntoIterator<Item = Part>,
    mut is_refused: impl FnMut(Table) -> bool,
) -> Option<&'static str> {
    let mut parts = parts.into_iter();
    parts.find_map(|(option, chains)| {
        let table = Table {
            family: TableFamily::Inet,
            name: NAME.to_owned(),
            chains,
        };
        is_refused(table).then_some(option)
    })
}

pub(crate) fn chain(kind: Kind, hook: Hook, rule: Vec<Expr>) -> Chain {
    Chain {
        name: "base".to_owned(),
        base: Some(Base {
            kind,
            hook,
            priority: -100,
            policy: Policy::Accept,
        }),
        rules: vec![Rule(rule)],
    }
}

pub(crate) fn write_and_delete(nftables: &mut Nftables, table: Table) -> Result<(), KernelError> {
    let delete = vec![table.id()];
    let create = vec![NewTable {
        table,
        comment: String::new(),
    }];
    let mut write = |change| {
        let generation = nftables.generation()?;
        nftables.change(generation, &change)
    };
    write(Change {
        create,
        ..Change::default()
    })?;
    write(Change {
        delete,
        ..Change::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_can_guard_ports() {
        assert_eq!(missing_for_guard(), None);
    }

    #[test]
    fn an_expression_that_the_kernel_lacks_is_missing() {
        let netns = Netns::create().unwrap();
        let mut nftables = netns.within(Nftables::open).unwrap().unwrap();
        let lacking = chain(
            Kind::Filter,
            Hook::Input,
            vec![Expr::Unknown("none".into())],
        );
        let missing = first_refused([("CONFIG_NONE", vec![lacking])], |table| {
            let refused = write_and_delete(&mut nftables, table).unwrap_err();
            refused.is(nix::Error::ENOENT)
        });
        assert_eq!(missing, Some("CONFIG_NONE"));
    }
}
