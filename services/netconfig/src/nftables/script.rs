use std::fmt::Write as _;

use crate::{
    backend::{Change, NewTable, Observed},
    rules::TableFamily,
};

/// Renders for `nft -f`, in one transaction, too.
pub(super) fn script(seen: &Observed, change: &Change) -> String {
    let ours = change.delete.iter();
    let mut lines: Vec<_> = ours
        .map(|(family, name)| format!("delete table {family} {name}\n"))
        .collect();
    let incumbent = seen.incumbent.iter().filter(|_| change.delete_incumbent);
    let sidecar = seen.sidecar.iter().filter(|_| change.delete_sidecar);
    let family = TableFamily::Inet;
    let others = incumbent.chain(sidecar);
    lines.extend(others.map(|name| format!("delete table {family} {name}\n")));
    lines.extend(change.create.iter().map(create));
    lines.concat()
}

fn create(new: &NewTable) -> String {
    let text = new.table.to_string();
    let (head, body) = text.split_once('\n').unwrap_or((&text, ""));
    let mut script = format!("{head}\n");
    // Writing to strings cannot fail.
    let _ = writeln!(script, "\tcomment \"{}\"", new.comment);
    script + body
}
