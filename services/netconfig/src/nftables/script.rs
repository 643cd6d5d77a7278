use std::fmt::Write as _;

use super::{
    leftovers::render_deletions,
    observed::{Change, NewTable},
};

/// Renders a change for `nft -f`, which also applies the script in one transaction.
pub(crate) fn script(change: &Change) -> String {
    let ours = change.delete.iter();
    let mut lines: Vec<_> = ours
        .map(|(family, name)| format!("delete table {family} {name}\n"))
        .collect();
    lines.extend(render_deletions(&change.leftovers));
    lines.extend(change.create.iter().map(create));
    lines.concat()
}

fn create(new: &NewTable) -> String {
    let text = new.table.to_string();
    let (head, body) = text.split_once('\n').unwrap_or((&text, ""));
    let mut script = format!("{head}\n");
    // Writing to a string cannot fail.
    let _ = writeln!(script, "\tcomment \"{}\"", new.comment);
    script + body
}
