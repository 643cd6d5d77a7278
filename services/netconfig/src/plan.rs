//! The desired state of a netns, its difference from the observed state, and the steps in between. Pure functions.

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

/// The observed state of a netns.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// The tables per backend. A backend without tables may be missing.
    pub(crate) seen: Vec<(Backend, Observed)>,
    pub(crate) routing: Routing,
    /// True if any TCP connection was ever opened in the netns.
    pub(crate) has_connected: bool,
    /// The state of `net.ipv4.tcp_migrate_req`, with which the kernel moves pending connections to another listener
    /// when theirs closes. `None` if the kernel does not support it.
    pub(crate) migrates: Option<bool>,
}

impl State {
    pub(crate) fn of(&self, backend: Backend) -> Option<&Observed> {
        let found = self.seen.iter().find(|(found, _)| *found == backend);
        found.map(|(_, observed)| observed)
    }

    /// Returns the backend of inpod's tables.
    pub(crate) fn backend(&self) -> Option<Backend> {
        let found = self.seen.iter().find(|(_, seen)| !seen.tables.is_empty());
        found.map(|(backend, _)| *backend)
    }

    pub(crate) fn tag(&self) -> Option<Tag> {
        self.seen.iter().find_map(|(_, observed)| observed.tag())
    }

    /// Returns whether remains of Istio's node agent exist.
    pub(crate) fn has_incumbent(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.incumbent.is_empty())
    }

    /// Returns whether remains of Istio's sidecar installer exist.
    pub(crate) fn has_sidecar(&self) -> bool {
        let left = self.seen.iter().any(|(_, seen)| !seen.sidecar.is_empty());
        left || !self.routing.incumbents().is_empty()
    }

    /// Returns whether inpod's rules redirect to a sidecar.
    pub(crate) fn is_of_sidecar(&self) -> bool {
        self.our_tables().any(Table::matches_socket_owners)
    }

    /// Returns inpod's routes, ip rules and addresses in the order of deletion.
    pub(crate) fn own_routing(&self) -> Vec<Item> {
        let returning = Expr::Source(Network::host(PASSTHROUGH_V6.into()));
        let uses_address = self
            .our_tables()
            .any(|table| table.has(|expr| *expr == returning));
        self.routing.ours(uses_address)
    }

    pub(crate) fn our_tables(&self) -> impl Iterator<Item = &Table> {
        let tables = self.seen.iter().flat_map(|(_, seen)| &seen.tables);
        tables.map(|seen| &seen.table)
    }

    /// Returns whether any rules exist, other than those of Istio's sidecar installer.
    pub(crate) fn has_rules(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.is_empty())
    }

    /// Returns whether any rules capture new connections of a family, other than those of Istio's sidecar installer.
    /// iptables' tables have one family each, and the kernel tracks only the connections of that family.
    fn captures(&self, family: Family) -> bool {
        self.seen.iter().any(|(_, seen)| seen.captures(family))
    }

    /// Like [`Self::captures`], for rules of Istio's sidecar installer.
    fn captures_for_sidecar(&self, family: Family) -> bool {
        let mut seen = self.seen.iter().map(|(_, seen)| seen);
        seen.any(|seen| seen.captures_for_sidecar(family))
    }

    /// Returns whether inpod's rules capture only new connections.
    fn captures_new_only(&self) -> bool {
        self.our_tables().any(captures_new_only)
    }

    /// Returns whether DNS may be captured. Rules may be missing: a part of them is enough.
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

/// Returns the families whose UDP DNS queries a table redirects to ztunnel.
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

/// The desired state of a netns.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) backend: Backend,
    pub(crate) form: Form,
    /// In evaluation order, as the backend stores them.
    pub(crate) tables: Vec<Table>,
    /// The tables to write before `tables` if uncaptured connections may exist: the same, capturing only new
    /// connections. Empty if there is no difference.
    pub(crate) new_only: Vec<Table>,
    /// In the order of addition.
    pub(crate) routing: Vec<Item>,
    pub(crate) fingerprint: Fingerprint,
}

impl Plan {
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

    /// Returns whether the redirection needs the source address that a sidecar's proxy uses to call the application.
    pub(crate) fn needs_address(&self) -> bool {
        self.routing.contains(&(Family::V6, Part::Address))
    }

    /// Returns whether the plan replaces the rules of Istio's sidecar installer.
    fn replaces_sidecar(&self) -> bool {
        self.form != Form::Ambient
    }

    pub(crate) fn with_new_only(self, new_only: Vec<Table>) -> Self {
        Self { new_only, ..self }
    }

    /// Returns the families whose DNS queries go to ztunnel.
    fn dns_families(&self) -> Vec<Family> {
        self.tables.iter().flat_map(dns_families).collect()
    }
}

/// Equal tables and routes have equal fingerprints.
fn fingerprint(tables: &[Table], routing: &[Item]) -> Fingerprint {
    let tables: String = tables.iter().map(ToString::to_string).collect();
    let routing = routing.iter();
    let routing: String = routing
        .map(|(family, part)| format!("{family} {part}\n"))
        .collect();
    Fingerprint::of(&format!("schema {SCHEMA}\n{tables}{routing}"))
}

/// Returns whether tables and routing are exactly those of a fingerprint, for any form and either or both families.
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
