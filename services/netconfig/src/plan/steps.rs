//! Describes steps as data, which apply executes and preview renders.

use std::fmt::Write as _;

use super::{Plan, State, captures_new_only};
use crate::{
    conntrack::stale_reply_port,
    family::Family,
    inspect::GRACE_PERIOD,
    marks::DNS_PORT,
    nftables::{Author, Change, NewTable, Observed, ObservedTable, script},
    routes::{self, Item},
    rules::{Table, Tag},
    sysctl::Ports,
};

/// A step of an apply. Between two steps, no traffic is lost, and no traffic escapes capture.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Enables the sysctl `net.ipv4.tcp_migrate_req`.
    EnableMigration,
    Add(Item),
    /// Deletes conntrack entries without NAT that are older than inpod's rules, because conntrack did not see the
    /// connections begin.
    FlushUntranslated(Vec<Family>),
    /// Writes rules that capture only new connections and leave existing connections alone. Like
    /// [`Self::WriteTables`], the step deletes the replaced rules.
    WriteNewOnly(Change),
    /// Waits for existing connections to close during the grace period.
    AwaitClosed,
    WriteTables(Change),
    /// Sets the sysctl `net.ipv4.ip_local_reserved_ports`, once the tables record the added ports.
    ReservePorts(Ports),
    /// Deletes entries of connections that conntrack did not see begin, or that outlived the grace period. The
    /// rules capture the next packet of such a connection, which breaks the connection.
    FlushExisting(Vec<Family>),
    Delete(Item),
    /// Deletes entries of DNS queries whose path changes, given the families whose queries go to ztunnel. An open
    /// socket would otherwise keep the old path (services/docs/facts/kernel.md, 5).
    FlushDns(Vec<Family>),
}

impl Plan {
    /// Returns steps that add new state first, and delete old state only once the new state exists.
    pub(crate) fn steps(&self, state: &State, tag: &Tag) -> Vec<Step> {
        let mut steps = Vec::new();
        if state.migrates == Some(false) {
            steps.push(Step::EnableMigration);
        }
        steps.extend(self.routing_additions(state).into_iter().map(Step::Add));
        let seen = &state.nftables;
        let uncaptured = self.uncaptured_families(state);
        let existing = if state.captures_new_only() {
            Family::ALL.to_vec()
        } else {
            uncaptured.clone()
        };
        let write = if uncaptured.is_empty() {
            self.write(seen, tag)
        } else {
            let new_only = self.new_only_plan().write(seen, tag);
            let with_new_only = after_change(seen, &new_only);
            steps.extend([
                Step::FlushUntranslated(uncaptured),
                Step::WriteNewOnly(new_only),
                Step::AwaitClosed,
            ]);
            self.write(&with_new_only, tag)
        };
        steps.extend((!write.is_empty()).then_some(Step::WriteTables(write)));
        let added = self.ports_to_reserve(state);
        let reserved = state.reserved_ports.clone();
        let reserved = reserved.filter(|_| !added.is_empty());
        steps.extend(reserved.map(|reserved| Step::ReservePorts(reserved.with(&added))));
        if !existing.is_empty() && !self.tables.iter().any(captures_new_only) {
            steps.push(Step::FlushExisting(existing));
        }
        let rewrites = steps
            .iter()
            .any(|step| matches!(step, Step::WriteTables(_)));
        steps.extend(self.surplus(state).into_iter().map(Step::Delete));
        let captured = self.dns_families();
        // Queries may have bypassed ztunnel while a rule was missing.
        if rewrites && (state.captures_dns() || !captured.is_empty()) {
            steps.push(Step::FlushDns(captured));
        }
        steps
    }

    /// Returns the families that may have uncaptured connections, for which tables capturing only new connections
    /// come first.
    fn uncaptured_families(&self, state: &State) -> Vec<Family> {
        let tables = || self.new_only.iter().filter(|table| table.captures());
        let is_of = |family: Family| tables().any(|table| table.family.has(family));
        let sidecar = |author| author == Author::Sidecar;
        let captures = |family| {
            let seen = &state.nftables;
            seen.captures(family)
                || (self.replaces_sidecar() && seen.leftovers.captures(family, sidecar))
        };
        let escapes = |family| !captures(family) || self.is_drifted(state, family);
        let mut families = Family::ALL.to_vec();
        families.retain(|family| state.has_connected && is_of(*family) && escapes(*family));
        families
    }

    /// Returns whether a table capturing a family was changed from outside, or left unfinished by a killed
    /// netconfig. Connections may have begun uncaptured meanwhile, and connection tracking would keep such
    /// connections uncaptured.
    fn is_drifted(&self, state: &State, family: Family) -> bool {
        let tag = state.tag();
        let is_own = tag.is_some_and(|tag| tag.fingerprint == self.fingerprint);
        let differs = |table| !self.differences_of(table, &state.nftables).is_empty();
        let mut captures = self.tables.iter().filter(|table| table.captures());
        is_own && captures.any(|table| table.family.has(family) && differs(table))
    }

    /// Returns the plan of the intermediate state, with the final fingerprint.
    pub(crate) fn new_only_plan(&self) -> Self {
        Self {
            tables: self.new_only.clone(),
            new_only: Vec::new(),
            routing: self.routing.clone(),
            ..*self
        }
    }

    /// Returns the missing routing in the order of addition. The address of Istio's sidecar installer becomes inpod's along with
    /// its rules, because nothing else would ever delete the address. Without a free table, there are no items:
    /// apply refuses such a state.
    pub(crate) fn routing_additions(&self, state: &State) -> Vec<Item> {
        let replaces = self.replaces_sidecar() && state.has_sidecar();
        let adopts = replaces && state.routing.has_foreign_address();
        let mut items = state.routing.items(&self.routing).unwrap_or_default();
        items.retain(|item| !state.routing.has(item) || (adopts && *item == Item::Address));
        items
    }

    /// Returns the change to the planned tables. If the fingerprint is the plan's, only differing tables are
    /// written; otherwise all, since each table carries the fingerprint.
    pub(crate) fn write(&self, seen: &Observed, tag: &Tag) -> Change {
        let stale = |id: &_| !self.tables.iter().any(|table| table.id() == *id);
        let written = self.tables.iter();
        let written = written.filter(|table| !self.differences_of(table, seen).is_empty());
        let written: Vec<_> = written.collect();
        let goes = |id: &_| stale(id) || written.iter().any(|table| table.id() == *id);
        Change {
            delete: seen.ids().into_iter().filter(goes).collect(),
            create: written.into_iter().map(|table| new(table, tag)).collect(),
            leftovers: seen.leftovers.select(|author| self.replaces(author)),
        }
    }
}

/// Returns the tables as a change of `seen` leaves them.
pub(crate) fn after_change(seen: &Observed, change: &Change) -> Observed {
    let stays = |id: &_| !change.delete.contains(id);
    let mut after = seen.clone();
    after.tables.retain(|found| stays(&found.table.id()));
    after.tables.extend(change.create.iter().map(observed));
    after.leftovers = after
        .leftovers
        .select(|author| !change.leftovers.has(|it| it == author));
    after
}

fn observed(new: &NewTable) -> ObservedTable {
    ObservedTable {
        table: new.table.clone(),
        comment: Some(new.comment.clone()),
        unknown_objects: 0,
        unread_rules: None,
        uncaptured_udp_flows: 0,
    }
}

fn new(table: &Table, tag: &Tag) -> NewTable {
    NewTable {
        table: table.clone(),
        comment: tag.to_string(),
    }
}

pub(crate) fn render(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        // Writing to a string cannot fail.
        let _ = match step {
            Step::EnableMigration => writeln!(text, "sysctl -w net.ipv4.tcp_migrate_req=1"),
            Step::ReservePorts(ports) => {
                writeln!(text, "sysctl -w net.ipv4.ip_local_reserved_ports={ports}")
            }
            Step::Add(item) => writeln!(text, "{}", routes::command("add", item)),
            Step::Delete(item) => writeln!(text, "{}", routes::command("del", item)),
            Step::FlushDns(captured) => write_dns_flush(&mut text, captured),
            Step::WriteNewOnly(change) | Step::WriteTables(change) => {
                write!(text, "{}", script(change))
            }
            Step::FlushUntranslated(families) => writeln!(
                text,
                "## conntrack: delete untranslated TCP entries of {}",
                join_families(families)
            ),
            Step::AwaitClosed => writeln!(
                text,
                "## wait up to {GRACE_PERIOD:?} for existing connections to close"
            ),
            Step::FlushExisting(families) => writeln!(
                text,
                "## conntrack: delete TCP entries of {} for connections that are older than the rules",
                join_families(families)
            ),
        };
    }
    text
}

fn join_families(families: &[Family]) -> String {
    let names: Vec<_> = families.iter().map(Family::to_string).collect();
    names.join(" and ")
}

fn write_dns_flush(text: &mut String, captured: &[Family]) -> std::fmt::Result {
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        let port = stale_reply_port(captured, family);
        writeln!(
            text,
            "conntrack -D -f {name} -p udp --orig-port-dst {DNS_PORT} --reply-port-src {port}"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        routes::Routing,
        rules::{Ambient, Expr, Form, Redirection, Rule},
    };

    fn plan() -> Plan {
        let redirection = Redirection::Ambient(Ambient::default());
        let new_only = redirection.for_new_connections_only().unwrap();
        Plan::new(Form::Ambient, redirection.ruleset().tables, &Family::ALL)
            .with_new_only(new_only.ruleset().tables)
    }

    fn state(nftables: Observed, has_connected: bool) -> State {
        State {
            nftables,
            routing: Routing::default(),
            has_connected,
            migrates: Some(true),
            reserved_ports: None,
        }
    }

    fn uncaptured_families(seen: Observed, has_connected: bool) -> Vec<Family> {
        plan().uncaptured_families(&state(seen, has_connected))
    }

    fn with_tables() -> Observed {
        let tables = plan().tables.into_iter();
        let tables = tables.map(|table| ObservedTable {
            table,
            comment: None,
            unknown_objects: 0,
            unread_rules: None,
            uncaptured_udp_flows: 0,
        });
        Observed {
            tables: tables.collect(),
            ..Observed::default()
        }
    }

    fn with_chains(change: impl Fn(&mut crate::rules::Chain)) -> Observed {
        let mut seen = with_tables();
        let chains = seen.tables.iter_mut().flat_map(|it| &mut it.table.chains);
        chains.for_each(change);
        seen
    }

    #[test]
    fn connections_are_unseen_where_nobodys_rules_capture() {
        assert_eq!(uncaptured_families(Observed::default(), true), Family::ALL);
        assert_eq!(uncaptured_families(Observed::default(), false), []);
        assert_eq!(uncaptured_families(with_tables(), true), []);
    }

    #[test]
    fn connections_are_unseen_where_rules_capture_nothing() {
        let emptied = with_chains(|chain| chain.rules.clear());
        assert_eq!(uncaptured_families(emptied, true), Family::ALL);
        let not_entered = with_chains(|chain| chain.base = None);
        assert_eq!(uncaptured_families(not_entered, true), Family::ALL);
        let idle = Rule(vec![Expr::NewConnection, Expr::Counter]);
        let drained = with_chains(|chain| chain.rules = vec![idle.clone()]);
        assert_eq!(uncaptured_families(drained, true), Family::ALL);
    }

    #[test]
    fn what_istio_left_captures_the_families_of_its_jumps() {
        use crate::nftables::leftovers::tests::{left_by_agent, left_by_sidecar};
        let seen = |leftovers| Observed {
            leftovers,
            ..Observed::default()
        };
        assert_eq!(
            uncaptured_families(seen(left_by_agent()), true),
            [Family::V6]
        );
        let state = state(seen(left_by_sidecar()), true);
        assert_eq!(plan().uncaptured_families(&state), Family::ALL);
        let replacing = Plan {
            form: Form::Sidecar,
            ..plan()
        };
        assert_eq!(replacing.uncaptured_families(&state), [Family::V6]);
    }

    #[test]
    fn what_is_written_first_replaces_what_is_there_and_is_replaced_itself() {
        let seen = with_tables();
        let plan = plan();
        let tag: Tag = format!(
            "inpod schema=2 fingerprint={} sandbox=n/c/e",
            plan.fingerprint
        )
        .parse()
        .unwrap();
        let new_only = plan.new_only_plan().write(&seen, &tag);
        assert_eq!(new_only.delete, seen.ids());
        let with_new_only = after_change(&seen, &new_only);
        assert_eq!(
            plan.new_only_plan().table_differences(&with_new_only),
            [""; 0]
        );
        let write = plan.write(&with_new_only, &tag);
        let done = after_change(&with_new_only, &write);
        assert_eq!(plan.table_differences(&done), [""; 0]);
    }
}
