//! What belongs in a netns, how what is there differs from it, and what is to be done about it. Pure.

mod differences;
mod steps;

pub(crate) use steps::{Step, render};

use crate::{
    backend::{Backend, Observed},
    family::Family,
    marks::ZTUNNEL_DNS_PORT,
    routes::{self, Item, Part, Routing},
    rules::{
        Expr, Fingerprint, Form, Network, Rule, SCHEMA, Table, Tag, Transport, ambient::RAW,
        sidecar::PASSTHROUGH_V6,
    },
};

/// What is in a netns that could be ours.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// What each backend holds. One that holds nothing may be missing.
    pub(crate) seen: Vec<(Backend, Observed)>,
    pub(crate) routing: Routing,
    /// Whether a connection was ever begun there.
    pub(crate) has_connected: bool,
    /// Whether connections are given to another listener when theirs closes; `None` where the kernel cannot.
    pub(crate) migrates: Option<bool>,
}

impl State {
    /// What a backend holds.
    pub(crate) fn of(&self, backend: Backend) -> Option<&Observed> {
        let found = self.seen.iter().find(|(found, _)| *found == backend);
        found.map(|(_, observed)| observed)
    }

    /// The backend that our tables are written with.
    pub(crate) fn backend(&self) -> Option<Backend> {
        let found = self.seen.iter().find(|(_, seen)| !seen.tables.is_empty());
        found.map(|(backend, _)| *backend)
    }

    /// The tag of our tables.
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.seen.iter().find_map(|(_, observed)| observed.tag())
    }

    /// Whether Istio's node agent left anything.
    pub(crate) fn has_incumbent(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.incumbent.is_empty())
    }

    /// Whether Istio's sidecar installer left anything.
    pub(crate) fn has_sidecar(&self) -> bool {
        let left = self.seen.iter().any(|(_, seen)| !seen.sidecar.is_empty());
        left || !self.routing.incumbents().is_empty()
    }

    /// Whether rules of ours are a sidecar's.
    pub(crate) fn is_of_sidecar(&self) -> bool {
        self.our_tables().any(Table::matches_socket_owners)
    }

    /// Routes, ip rules and addresses of ours, in the order in which they go.
    pub(crate) fn own_routing(&self) -> Vec<Item> {
        let returning = Expr::Source(Network::host(PASSTHROUGH_V6.into()));
        let uses_address = self
            .our_tables()
            .any(|table| table.has(|expr| *expr == returning));
        self.routing.ours(uses_address)
    }

    /// What is there of ours, whichever backend holds it.
    pub(crate) fn our_tables(&self) -> impl Iterator<Item = &Table> {
        let tables = self.seen.iter().flat_map(|(_, seen)| &seen.tables);
        tables.map(|seen| &seen.table)
    }

    /// Whether there are rules of anybody's, those of Istio's sidecar installer left out.
    pub(crate) fn has_rules(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.is_empty())
    }

    /// Whether connections of a family are captured when they begin, by rules of anybody's, those of Istio's sidecar
    /// installer left out. iptables' tables are of one family each, and the kernel tracks those alone.
    fn captures(&self, family: Family) -> bool {
        self.seen.iter().any(|(_, seen)| seen.captures(family))
    }

    /// The same of rules of Istio's sidecar installer.
    fn captures_for_sidecar(&self, family: Family) -> bool {
        let mut seen = self.seen.iter().map(|(_, seen)| seen);
        seen.any(|seen| seen.captures_for_sidecar(family))
    }

    /// Whether rules of ours capture only what begins.
    fn captures_new_only(&self) -> bool {
        self.our_tables().any(captures_new_only)
    }

    /// Whether name resolution may be captured. Rules may be missing: a part of them is enough.
    pub(crate) fn captures_dns(&self) -> bool {
        let mut tables = self.our_tables();
        self.has_incumbent()
            || self.has_sidecar()
            || tables.any(|table| table.name == RAW || !dns_families(table).is_empty())
    }
}

fn captures_new_only(table: &Table) -> bool {
    table.has(|expr| *expr == Expr::TcpSyn)
}

/// The families whose questions for names over UDP a table leads to ztunnel.
fn dns_families(table: &Table) -> Vec<Family> {
    let leads = |rule: &&Rule| {
        let of = |expr| rule.0.contains(expr);
        of(&Expr::Redirect(ZTUNNEL_DNS_PORT)) && of(&Expr::Protocol(Transport::Udp))
    };
    let rules = table.chains.iter().flat_map(|chain| &chain.rules);
    let families = rules.filter(leads).flat_map(|rule| {
        let only = rule.0.iter().find_map(Expr::family);
        let is_of = move |family: &Family| only.is_none_or(|only| only == *family);
        Family::ALL.into_iter().filter(is_of)
    });
    families
        .filter(|family| table.family.has(*family))
        .collect()
}

/// What belongs in a netns.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) backend: Backend,
    /// What the redirection is of.
    pub(crate) form: Form,
    /// As the backend keeps them, in the order in which they take effect.
    pub(crate) tables: Vec<Table>,
    /// What is written before them where connections may be there that no rule has seen: the same, capturing only
    /// what begins. Empty where that makes no difference.
    pub(crate) new_only: Vec<Table>,
    /// In the order in which they are added.
    pub(crate) routing: Vec<Item>,
    pub(crate) fingerprint: Fingerprint,
}

impl Plan {
    /// Tables, and what they need beside them for these families.
    pub(crate) fn new(
        backend: Backend,
        form: Form,
        tables: Vec<Table>,
        families: &[Family],
    ) -> Self {
        let routing = routes::needed(form, families);
        Self {
            backend,
            form,
            fingerprint: fingerprint(&tables, &routing),
            tables,
            new_only: Vec::new(),
            routing,
        }
    }

    /// Whether the address from which a sidecar's proxy calls the application belongs to it.
    pub(crate) fn needs_address(&self) -> bool {
        self.routing.contains(&(Family::V6, Part::Address))
    }

    /// Whether what Istio's sidecar installer left is to be replaced.
    fn replaces_sidecar(&self) -> bool {
        self.form != Form::Ambient
    }

    /// Lets connections from before end, if they do so soon.
    pub(crate) fn with_new_only(self, new_only: Vec<Table>) -> Self {
        Self { new_only, ..self }
    }

    /// The families whose questions for names go to ztunnel.
    fn dns_families(&self) -> Vec<Family> {
        self.tables.iter().flat_map(dns_families).collect()
    }
}

/// Identifies tables and routes: equal ones, equal fingerprint.
fn fingerprint(tables: &[Table], routing: &[Item]) -> Fingerprint {
    let tables: String = tables.iter().map(ToString::to_string).collect();
    let routing = routing.iter();
    let routing: String = routing
        .map(|(family, part)| format!("{family} {part}\n"))
        .collect();
    Fingerprint::of(&format!("schema {SCHEMA}\n{tables}{routing}"))
}

/// Whether what is there is exactly what bears a fingerprint: the tables, and what one form or another needs beside
/// them for one family or both.
pub(crate) fn is_intact(state: &State, backend: Backend, tagged: Fingerprint) -> bool {
    let Some(seen) = state.of(backend) else {
        return false;
    };
    let tables: Vec<_> = seen.tables.iter().map(|seen| seen.table.clone()).collect();
    let bears_it = |form, families: &[Family]| {
        let plan = Plan::new(backend, form, tables.clone(), families);
        plan.fingerprint == tagged && plan.differences(state).is_empty()
    };
    let mut forms = Form::ALL.into_iter();
    forms.any(|form| bears_it(form, &[Family::V4]) || bears_it(form, &Family::ALL))
}
