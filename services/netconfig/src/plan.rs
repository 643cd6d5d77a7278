//! The desired state of a netns, its difference from the observed one, and the steps in between.

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

#[derive(Clone, Debug)]
pub(crate) struct State {
    /// Per backend; one without tables may be missing.
    pub(crate) seen: Vec<(Backend, Observed)>,
    pub(crate) routing: Routing,
    /// Any TCP connection was ever opened.
    pub(crate) has_connected: bool,
    /// `net.ipv4.tcp_migrate_req`, by which pending connections move to another listener when theirs
    /// closes. `None` if unsupported.
    pub(crate) migrates: Option<bool>,
}

impl State {
    pub(crate) fn of(&self, backend: Backend) -> Option<&Observed> {
        let found = self.seen.iter().find(|(found, _)| *found == backend);
        found.map(|(_, observed)| observed)
    }

    pub(crate) fn backend(&self) -> Option<Backend> {
        let found = self.seen.iter().find(|(_, seen)| !seen.tables.is_empty());
        found.map(|(backend, _)| *backend)
    }

    pub(crate) fn tag(&self) -> Option<Tag> {
        self.seen.iter().find_map(|(_, observed)| observed.tag())
    }

    /// Remains of Istio's node agent exist.
    pub(crate) fn has_incumbent(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.incumbent.is_empty())
    }

    /// Remains of Istio's sidecar installer exist.
    pub(crate) fn has_sidecar(&self) -> bool {
        let left = self.seen.iter().any(|(_, seen)| !seen.sidecar.is_empty());
        left || !self.routing.incumbents().is_empty()
    }

    pub(crate) fn is_of_sidecar(&self) -> bool {
        self.our_tables().any(Table::matches_socket_owners)
    }

    /// Returns inpod's items in the order of deletion.
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

    /// Rules of Istio's sidecar installer do not count.
    pub(crate) fn has_rules(&self) -> bool {
        self.seen.iter().any(|(_, seen)| !seen.is_empty())
    }

    /// Returns whether rules, other than of Istio's sidecar installer, capture new connections of a family. iptables'
    /// tables have one family each, and the kernel tracks no connections of others.
    fn captures(&self, family: Family) -> bool {
        self.seen.iter().any(|(_, seen)| seen.captures(family))
    }

    /// Like [`Self::captures`], for rules of Istio's sidecar installer.
    fn captures_for_sidecar(&self, family: Family) -> bool {
        let mut seen = self.seen.iter().map(|(_, seen)| seen);
        seen.any(|seen| seen.captures_for_sidecar(family))
    }

    fn captures_new_only(&self) -> bool {
        self.our_tables().any(captures_new_only)
    }

    /// Counts a part of the rules, too.
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

/// Families whose UDP DNS queries it redirects to ztunnel.
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

#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) backend: Backend,
    pub(crate) form: Form,
    /// In evaluation order, as the backend stores them.
    pub(crate) tables: Vec<Table>,
    /// Written before `tables` if uncaptured connections may exist: the same, for new connections
    /// only. Empty if equal.
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

    /// Returns whether it needs the source address of a sidecar's proxy's calls to the application.
    pub(crate) fn needs_address(&self) -> bool {
        self.routing.contains(&(Family::V6, Part::Address))
    }

    /// Returns whether it replaces rules of Istio's sidecar installer.
    fn replaces_sidecar(&self) -> bool {
        self.form != Form::Ambient
    }

    pub(crate) fn with_new_only(self, new_only: Vec<Table>) -> Self {
        Self { new_only, ..self }
    }

    /// Families whose DNS queries go to ztunnel.
    fn dns_families(&self) -> Vec<Family> {
        self.tables.iter().flat_map(dns_families).collect()
    }
}

fn fingerprint(tables: &[Table], routing: &[Item]) -> Fingerprint {
    let tables: String = tables.iter().map(ToString::to_string).collect();
    let routing = routing.iter();
    let routing: String = routing
        .map(|(family, part)| format!("{family} {part}\n"))
        .collect();
    Fingerprint::of(&format!("schema {SCHEMA}\n{tables}{routing}"))
}

/// Returns whether the state is exactly that of a fingerprint, for any form and families.
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
