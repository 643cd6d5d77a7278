//! Renders a change for `iptables-restore --noflush`: a script per family, with the changed tables. Each section from
//! `*table` to `COMMIT` is atomic.

use std::collections::BTreeSet;

use super::{
    layout::{IstioChain, TABLES, iptables_table, parent_chain, table_family, to_iptables_chain},
    render::render,
    tokens::quote,
};
use crate::{
    backend::{Change, Jump, NewTable, Observed},
    family::Family,
    rules::{Expr, Table, TableFamily, ambient::MANGLE},
};

pub(super) fn scripts(seen: &Observed, change: &Change) -> Vec<(Family, String)> {
    let script = |family| Some((family, script_of(table_family(family), seen, change)));
    let scripts = Family::ALL.into_iter().filter_map(script);
    scripts.filter(|(_, text)| !text.is_empty()).collect()
}

/// Creates in evaluation order, then deletes old tables in reverse.
fn script_of(family: TableFamily, seen: &Observed, change: &Change) -> String {
    let created = creation_order(family, seen, change);
    let is_new = |name: &str| created.iter().any(|new| new.table.name == name);
    let mut script: String = created.iter().map(|new| create_table(new, seen)).collect();
    for (table_name, ours) in TABLES.into_iter().rev() {
        let id = (family, ours.to_owned());
        if change.delete.contains(&id) && !is_new(ours) {
            script += &section(table_name, &delete_table(&id, seen));
        }
    }
    for (table_name, ours) in TABLES.into_iter().rev() {
        let mut lines = Vec::new();
        if change.delete_incumbent {
            lines.extend(delete_chains(
                (family, ours),
                table_name,
                &seen.incumbent,
                seen,
            ));
        }
        if change.delete_sidecar {
            let id = (family, ours.to_owned());
            lines.extend(jumps_to(&id, &[""], seen));
            lines.extend(delete_chains(
                (family, ours),
                table_name,
                &seen.sidecar,
                seen,
            ));
        }
        script += &section(table_name, &lines);
    }
    script
}

/// Orders raw, mangle, nat: packets get marks and zones before nat captures them. If mangle captures now and no
/// longer will, it follows nat, so that nothing escapes in between.
fn creation_order<'a>(
    family: TableFamily,
    seen: &Observed,
    change: &'a Change,
) -> Vec<&'a NewTable> {
    let captured = seen.tables.iter().map(|seen| &seen.table);
    let captured = captured
        .filter(|table| table.family == family)
        .any(tproxies);
    let created = change.create.iter();
    let mut created: Vec<_> = created.filter(|new| new.table.family == family).collect();
    let releases = captured && !created.iter().any(|new| tproxies(&new.table));
    created.sort_by_key(|new| {
        let mut order = TABLES.iter();
        let table_name = order.position(|(_, name)| *name == new.table.name);
        (releases && new.table.name == MANGLE, table_name)
    });
    created
}

fn tproxies(table: &Table) -> bool {
    let mut rules = table.chains.iter().flat_map(|chain| &chain.rules);
    rules.any(|rule| rule.0.iter().any(|expr| matches!(expr, Expr::Tproxy(..))))
}

fn section(table_name: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    format!("*{table_name}\n{}\nCOMMIT\n", lines.join("\n"))
}

/// Naming a chain creates or flushes it.
fn create_table(new: &NewTable, seen: &Observed) -> String {
    let (table, id) = (&new.table, new.table.id());
    let Some(table_name) = iptables_table(&table.name) else {
        return String::new();
    };
    let chains = || {
        table
            .chains
            .iter()
            .map(|chain| to_iptables_chain(&chain.name))
    };
    let mut lines: Vec<_> = chains().map(|chain| format!(":{chain} - [0:0]")).collect();
    lines.extend(jumps_to_ours(&id, seen));
    lines.extend(entry_jumps(new));
    for chain in &table.chains {
        let name = to_iptables_chain(&chain.name);
        let rules = chain.rules.iter().map(render);
        lines.extend(rules.map(|rule| format!("-A {name} {rule}").trim_end().to_owned()));
    }
    let wanted: BTreeSet<_> = chains().collect();
    let stale: Vec<_> = chains_seen(&id, seen)
        .into_iter()
        .filter(|chain| !wanted.contains(chain))
        .collect();
    lines.extend(flush_and_delete(&stale));
    section(table_name, &lines)
}

/// Jumps at the top of the built-in chains, with the tag.
fn entry_jumps(new: &NewTable) -> impl Iterator<Item = String> {
    let comment = &new.comment;
    let tag = if comment.is_empty() {
        String::new()
    } else {
        format!("-m comment --comment {} ", quote(comment))
    };
    let entered = new.table.chains.iter().filter(|chain| chain.base.is_some());
    entered.filter_map(move |chain| {
        let (origin, name) = (parent_chain(&chain.name)?, to_iptables_chain(&chain.name));
        Some(format!("-I {origin} 1 {tag}-j {name}"))
    })
}

pub(crate) fn jumps(new: &NewTable) -> Vec<Jump> {
    let jump = |line: String| {
        let (chain, rule) = line.strip_prefix("-I ")?.split_once(" 1 ")?;
        let (_, to) = rule.rsplit_once("-j ")?;
        Some(Jump {
            table: new.table.id(),
            to: to.to_owned(),
            rule: format!("{chain} {rule}"),
        })
    };
    entry_jumps(new).filter_map(jump).collect()
}

fn delete_table(id: &(TableFamily, String), seen: &Observed) -> Vec<String> {
    let mut lines = jumps_to_ours(id, seen);
    lines.extend(flush_and_delete(&chains_seen(id, seen)));
    lines
}

fn jumps_to_ours(id: &(TableFamily, String), seen: &Observed) -> Vec<String> {
    let chains = chains_seen(id, seen);
    jumps_to(id, &chains, seen)
}

fn jumps_to(id: &(TableFamily, String), chains: &[&str], seen: &Observed) -> Vec<String> {
    let matches_jump = |jump: &&Jump| jump.table == *id && chains.contains(&jump.to.as_str());
    let jumps = seen.jumps.iter().filter(matches_jump);
    jumps.map(|jump| format!("-D {}", jump.rule)).collect()
}

fn chains_seen<'a>(id: &(TableFamily, String), seen: &'a Observed) -> Vec<&'a str> {
    let mut tables = seen.tables.iter().map(|seen| &seen.table);
    let table = tables.find(|table| table.id() == *id);
    let chains = table.into_iter().flat_map(|table| &table.chains);
    chains.map(|chain| to_iptables_chain(&chain.name)).collect()
}

/// Flushes all first, since they may refer to each other.
fn flush_and_delete(chains: &[&str]) -> Vec<String> {
    let all = |verb: &'static str| chains.iter().map(move |chain| format!("-{verb} {chain}"));
    all("F").chain(all("X")).collect()
}

fn delete_chains(
    (family, ours): (TableFamily, &str),
    table_name: &str,
    names: &[String],
    seen: &Observed,
) -> Vec<String> {
    let all = names.iter().filter_map(|name| name.parse().ok());
    let here = all.filter(|found: &IstioChain| found.family == family && found.table == table_name);
    let chains: Vec<_> = here.map(|found| found.chain).collect();
    let chains: Vec<_> = chains.iter().map(String::as_str).collect();
    let mut lines = jumps_to(&(family, ours.to_owned()), &chains, seen);
    lines.extend(flush_and_delete(&chains));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::ObservedTable,
        iptables::normalize::normalize,
        rules::{Ambient, InboundCapture, Redirection},
    };

    fn tables(settings: Ambient) -> Vec<Table> {
        let ruleset = Redirection::Ambient(settings).ruleset();
        normalize(&ruleset, &Family::ALL)
    }

    fn with(dns_capture: bool, inbound_capture: InboundCapture) -> Vec<Table> {
        tables(Ambient {
            dns_capture,
            inbound_capture,
            ..Ambient::default()
        })
    }

    fn seen(tables: Vec<Table>) -> Observed {
        let observed = |table| ObservedTable {
            table,
            comment: None,
            unknown_objects: 0,
        };
        Observed {
            tables: tables.into_iter().map(observed).collect(),
            ..Observed::default()
        }
    }

    /// Returns the order of writing all of inpod's tables.
    fn order(before: &[Table], after: &[Table]) -> Vec<String> {
        let new = |table: &Table| NewTable {
            table: table.clone(),
            comment: "a tag".to_owned(),
        };
        let seen = seen(before.to_vec());
        let change = Change {
            delete: seen.ids(),
            create: after.iter().map(new).collect(),
            ..Change::default()
        };
        let scripts = scripts(&seen, &change);
        let lines = scripts.iter().flat_map(|(_, script)| script.lines());
        let order = lines.filter_map(|line| line.strip_prefix('*'));
        order.map(str::to_owned).collect()
    }

    use InboundCapture::{Redirect, Tproxy};

    #[test]
    fn tables_come_in_the_order_in_which_they_take_effect_and_go_in_reverse() {
        let names = with(true, Redirect);
        let none: [Table; 0] = [];
        assert_eq!(
            order(&none, &names),
            ["raw", "mangle", "nat", "raw", "mangle", "nat"]
        );
        assert_eq!(
            order(&names, &none),
            ["nat", "mangle", "raw", "nat", "mangle", "raw"]
        );
    }

    #[test]
    fn what_captures_is_there_before_what_captured_goes() {
        let (redirect, tproxy) = (with(false, Redirect), with(false, Tproxy));
        assert_eq!(
            order(&redirect, &tproxy),
            ["mangle", "nat", "mangle", "nat"]
        );
        assert_eq!(
            order(&tproxy, &redirect),
            ["nat", "mangle", "nat", "mangle"]
        );
        assert_eq!(
            order(&tproxy, &with(true, Redirect)),
            ["raw", "nat", "mangle", "raw", "nat", "mangle"]
        );
        assert_eq!(
            order(&with(true, Tproxy), &redirect),
            ["nat", "mangle", "raw", "nat", "mangle", "raw"]
        );
        assert_eq!(
            order(&tproxy, &with(true, Tproxy)),
            ["raw", "mangle", "nat", "raw", "mangle", "nat"]
        );
    }

    #[test]
    fn a_family_in_which_nothing_changes_has_no_script() {
        let all = with(false, Redirect);
        let change = Change {
            delete: vec![(TableFamily::Ip6, MANGLE.to_owned())],
            ..Change::default()
        };
        let scripts = scripts(&seen(all), &change);
        let [(family, script)] = scripts.as_slice() else {
            panic!("{scripts:?}");
        };
        assert_eq!(*family, Family::V6);
        let wanted = "*mangle\n-F INPOD_PREROUTING\n-F INPOD_OUTPUT\n\
            -X INPOD_PREROUTING\n-X INPOD_OUTPUT\nCOMMIT\n";
        assert_eq!(script, wanted);
    }

    /// An undo writes what it read.
    #[test]
    fn a_chain_that_was_not_entered_is_written_without_its_jump() {
        let mut nat = with(false, Redirect).remove(1);
        nat.chains[1].base = None;
        let change = Change {
            create: vec![NewTable {
                table: nat,
                comment: String::new(),
            }],
            ..Change::default()
        };
        let (_, script) = scripts(&Observed::default(), &change).remove(0);
        assert!(
            script.contains("-I PREROUTING 1 -j INPOD_PREROUTING\n"),
            "{script}"
        );
        assert!(!script.contains("-j INPOD_OUTPUT"), "{script}");
        assert!(script.contains("-A INPOD_OUTPUT "), "{script}");
    }
}
