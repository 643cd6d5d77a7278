//! What is to be done, as data: carried out by an apply, printed by a plan.

use std::fmt::Write as _;

use super::{Plan, State, captures_beginnings};
use crate::{
    backend::{Backend, Change, NewTable, Observed, ObservedTable},
    conntrack::wrong_way,
    family::Family,
    inspect::SETTLING,
    iptables,
    marks::DNS_PORT,
    routes::{self, Item},
    rules::Tag,
};

/// One step. In between two of them traffic is neither let out nor lost.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Connections are to be given to another listener when theirs closes.
    Migrate,
    /// A route, ip rule or address is added.
    Add(Item),
    /// A route, ip rule or address that another one made, and that does the same, becomes ours.
    Adopt(Item),
    /// Connection tracking forgets connections that were there before our rules: each is one that it did not see begin.
    ForgetStrangers,
    /// Our tables are written so that they capture what begins, and leave alone what is there.
    Begin(Change),
    /// Connections that are there may end, for a while.
    Settle,
    /// Our tables are written.
    Write(Change),
    /// Connection tracking forgets connections that it did not see begin: what has not ended is captured, which cuts it.
    ForgetBefore,
    /// What another backend holds of ours, or Istio left, is deleted.
    Clear(Backend, Change),
    /// A route, ip rule or address goes.
    Delete(Item),
    /// Connection tracking forgets the questions for names that go another way than from now on, where those of these
    /// families go to ztunnel: a socket that lives on would go on as before (kernel-facts.md, 5).
    ForgetNames(Vec<Family>),
}

impl Plan {
    /// Everything that is to be done, in order: what is new comes first, and what is old goes when that is there.
    pub(crate) fn steps(&self, state: &State, tag: &Tag) -> Vec<Step> {
        let mut steps = Vec::new();
        if state.migrates == Some(false) {
            steps.push(Step::Migrate);
        }
        steps.extend(self.additions(state));
        let nothing = Observed::default();
        let seen = state.of(self.backend).unwrap_or(&nothing);
        let begun = self.begin(state, tag);
        let write = self.write(&begun.as_ref().map_or_else(|| seen.clone(), written), tag);
        let begins = begun.map(|begin| [Step::ForgetStrangers, Step::Begin(begin), Step::Settle]);
        let cuts = begins.is_some() || state.captures_beginnings();
        steps.extend(begins.into_iter().flatten());
        steps.extend((!write.is_empty()).then_some(Step::Write(write)));
        if cuts && !self.tables.iter().any(captures_beginnings) {
            steps.push(Step::ForgetBefore);
        }
        steps.extend(self.clearings(state));
        let is_rewrite = |step: &Step| matches!(step, Step::Write(_) | Step::Clear(..));
        let rewrites = steps.iter().any(is_rewrite);
        steps.extend(self.surplus(state).into_iter().map(Step::Delete));
        let led = self.led_names();
        // They may have gone past ztunnel also while a rule was missing.
        if rewrites && (state.captures_names() || !led.is_empty()) {
            steps.push(Step::ForgetNames(led));
        }
        steps
    }

    /// What is written first, where connections may be there that no rule has seen.
    fn begin(&self, state: &State, tag: &Tag) -> Option<Change> {
        let is_captured = state.has_rules() || (self.replaces_sidecar() && state.has_sidecar());
        let is_wanted = !self.first.is_empty() && state.has_connected && !is_captured;
        is_wanted.then(|| self.first().write(&Observed::default(), tag))
    }

    /// The plan up to where connections from before are left alone. It bears the fingerprint of what is to come.
    pub(crate) fn first(&self) -> Self {
        Self {
            tables: self.first.clone(),
            first: Vec::new(),
            routing: self.routing.clone(),
            ..*self
        }
    }

    /// Routes of the incumbent are taken over with its rules: nobody else would ever delete them.
    fn additions(&self, state: &State) -> Vec<Step> {
        let replaces = state.has_incumbent() || (self.replaces_sidecar() && state.has_sidecar());
        let step = |item: &Item| {
            if state.routing.has_ours(*item) {
                None
            } else if !state.routing.has(*item) {
                Some(Step::Add(*item))
            } else {
                replaces.then_some(Step::Adopt(*item))
            }
        };
        self.routing.iter().filter_map(step).collect()
    }

    /// How our tables become what they are to be. Where they are the ones of this plan, those that differ are written;
    /// else all are, since each bears the plan's fingerprint.
    pub(crate) fn write(&self, seen: &Observed, tag: &Tag) -> Change {
        let differs = |table: &_| {
            let alone = Self {
                tables: vec![Clone::clone(table)],
                first: Vec::new(),
                routing: Vec::new(),
                ..*self
            };
            let found = seen
                .tables
                .iter()
                .filter(|seen| seen.table.id() == table.id());
            let seen = Observed {
                tables: found.cloned().collect(),
                ..Observed::default()
            };
            !alone.table_differences(&seen).is_empty()
        };
        let stale = |id: &_| !self.tables.iter().any(|table| table.id() == *id);
        let written: Vec<_> = self.tables.iter().filter(|table| differs(table)).collect();
        let goes = |id: &_| stale(id) || written.iter().any(|table| table.id() == *id);
        Change {
            delete: seen.ids().into_iter().filter(goes).collect(),
            create: written.into_iter().map(|table| new(table, tag)).collect(),
            ..Change::default()
        }
    }

    fn clearings(&self, state: &State) -> Vec<Step> {
        let clearing = |(backend, seen): &(Backend, Observed)| {
            let is_own = *backend == self.backend;
            let change = Change {
                delete: if is_own { Vec::new() } else { seen.ids() },
                create: Vec::new(),
                delete_incumbent: !seen.incumbent.is_empty(),
                delete_sidecar: self.replaces_sidecar() && !seen.sidecar.is_empty(),
            };
            (!change.is_empty()).then_some(Step::Clear(*backend, change))
        };
        state.seen.iter().filter_map(clearing).collect()
    }
}

/// What is there after a change where nothing was.
fn written(change: &Change) -> Observed {
    let observed = |new: &NewTable| ObservedTable {
        table: new.table.clone(),
        comment: Some(new.comment.clone()),
        others: 0,
    };
    Observed {
        tables: change.create.iter().map(observed).collect(),
        jumps: change.create.iter().flat_map(iptables::jumps).collect(),
        ..Observed::default()
    }
}

fn new(table: &crate::rules::Table, tag: &Tag) -> NewTable {
    NewTable {
        table: table.clone(),
        comment: tag.to_string(),
    }
}

/// The steps in the words of sysctl, ip, nft and iptables-restore.
pub(crate) fn print(
    steps: &[Step],
    state: &State,
    plan: &Plan,
    script: impl Fn(Backend, &Observed, &Change) -> String,
) -> String {
    let nothing = Observed::default();
    let mut begun = Observed::default();
    let mut text = String::new();
    for step in steps {
        // Writing to a string cannot fail.
        let _ = match step {
            Step::Migrate => writeln!(text, "sysctl -w net.ipv4.tcp_migrate_req=1"),
            Step::Add(item) => writeln!(text, "{}", routes::command("add", *item)),
            Step::Adopt(item) => writeln!(text, "{}", routes::command("replace", *item)),
            Step::Delete(item) => writeln!(text, "{}", routes::command("del", *item)),
            Step::ForgetNames(led) => forget(&mut text, led),
            Step::Begin(change) => {
                begun = written(change);
                write!(text, "{}", script(plan.backend, &nothing, change))
            }
            Step::ForgetStrangers => writeln!(
                text,
                "## connection tracking forgets TCP connections that it does not translate"
            ),
            Step::Settle => writeln!(text, "## connections from before may end, for {SETTLING:?}"),
            Step::ForgetBefore => writeln!(
                text,
                "## connection tracking forgets TCP connections that it did not see begin"
            ),
            Step::Write(change) => {
                let seen = if begun.is_empty() {
                    state.of(plan.backend).unwrap_or(&nothing)
                } else {
                    &begun
                };
                write!(text, "{}", script(plan.backend, seen, change))
            }
            Step::Clear(backend, change) => {
                let seen = state.of(*backend).unwrap_or(&nothing);
                write!(text, "{}", script(*backend, seen, change))
            }
        };
    }
    text
}

fn forget(text: &mut String, led: &[Family]) -> std::fmt::Result {
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        let wrong = wrong_way(led, family);
        writeln!(
            text,
            "conntrack -D -f {name} -p udp --orig-port-dst {DNS_PORT} --reply-port-src {wrong}"
        )?;
    }
    Ok(())
}
