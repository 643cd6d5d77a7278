//! Computes the desired state of a netns, its difference from the observed state, and the steps in between.

mod differences;
mod steps;

pub(crate) use steps::{Step, after_change, render};

use crate::{
    family::Family,
    marks::{ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    nftables::{Author, Observed},
    routes::{self, Item, Need, Part, Routing},
    rules::{
        Expr, Fingerprint, Form, Network, Rule, SCHEMA, Table, Tag, Transport, ambient::RAW,
        sidecar::PASSTHROUGH_V6,
    },
    sysctl::Ports,
};

#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) nftables: Observed,
    pub(crate) routing: Routing,
    /// True if any TCP connection was ever opened from or to the netns.
    pub(crate) has_connected: bool,
    /// The sysctl `net.ipv4.tcp_migrate_req`, by which pending connections move to another listener when their own
    /// listener closes. `None` if unsupported.
    pub(crate) migrates: Option<bool>,
    /// The sysctl `net.ipv4.ip_local_reserved_ports`. `None` if netconfig cannot replace the value.
    pub(crate) reserved_ports: Option<Ports>,
}

impl State {
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.nftables.tag()
    }

    /// Returns whether inpod enabled [`Self::migrates`], and therefore has to disable the sysctl at the end.
    pub(crate) fn has_enabled_migration(&self) -> bool {
        self.nftables.leftovers.migrates || self.tag().is_some_and(|tag| tag.migrates)
    }

    /// Returns the ports that inpod added to [`Self::reserved_ports`], and therefore has to remove at the end.
    pub(crate) fn ports_added(&self) -> Vec<u16> {
        self.tag().map_or_else(Vec::new, |tag| tag.reserved)
    }

    /// Returns whether rules of Istio's node agent, or of an earlier inpod, are left.
    pub(crate) fn has_incumbent(&self) -> bool {
        self.nftables.leftovers.has(Author::is_replaced_by_all)
    }

    /// Returns whether rules or routing of Istio's sidecar installer are left.
    pub(crate) fn has_sidecar(&self) -> bool {
        let left = self.nftables.leftovers.has(|it| it == Author::Sidecar);
        left || !self.routing.sidecar_items().is_empty()
    }

    pub(crate) fn is_of_sidecar(&self) -> bool {
        self.our_tables().any(Table::matches_socket_owners)
    }

    /// Returns inpod's items of routing in the order of deletion.
    pub(crate) fn own_routing(&self) -> Vec<Item> {
        let returning = Expr::Source(Network::host(PASSTHROUGH_V6.into()));
        let uses_address = self
            .our_tables()
            .any(|table| table.has(|expr| *expr == returning));
        self.routing.own_items(uses_address)
    }

    pub(crate) fn our_tables(&self) -> impl Iterator<Item = &Table> {
        self.nftables.tables.iter().map(|seen| &seen.table)
    }

    fn captures_new_only(&self) -> bool {
        self.our_tables().any(captures_new_only)
    }

    /// Returns whether rules may redirect DNS queries; an incomplete set of rules counts as well.
    pub(crate) fn captures_dns(&self) -> bool {
        let mut tables = self.our_tables();
        self.has_incumbent()
            || self.has_sidecar()
            || tables.any(|table| table.name == RAW || !dns_families(table).is_empty())
    }
}

fn captures_new_only(table: &Table) -> bool {
    let mut rules = table.chains.iter().flat_map(|chain| &chain.rules);
    rules.any(|rule| rule.0.contains(&Expr::TcpSyn) && !rule.is_guard())
}

/// Returns the families whose UDP DNS queries the table redirects to ztunnel.
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
    pub(crate) form: Form,
    /// The desired tables, in evaluation order.
    pub(crate) tables: Vec<Table>,
    /// Tables written before `tables` if uncaptured connections may exist: the same rules, restricted to new
    /// connections. Empty if `tables` capture only new connections themselves.
    pub(crate) new_only: Vec<Table>,
    /// The routing that the tables need, in the order of addition. The state decides about the numbers.
    pub(crate) routing: Vec<Need>,
    pub(crate) fingerprint: Fingerprint,
}

impl Plan {
    pub(crate) fn new(form: Form, tables: Vec<Table>, families: &[Family]) -> Self {
        let routing = routes::needed(form, families);
        Self {
            form,
            fingerprint: fingerprint(&tables, &routing),
            tables,
            new_only: Vec::new(),
            routing,
        }
    }

    /// Returns whether the plan needs the source address from which a sidecar's proxy calls the application.
    pub(crate) fn needs_address(&self) -> bool {
        self.routing.contains(&(Family::V6, Part::Address))
    }

    /// Returns whether the plan replaces rules of Istio's sidecar installer.
    fn replaces_sidecar(&self) -> bool {
        self.form != Form::Ambient
    }

    fn replaces(&self, author: Author) -> bool {
        author.is_replaced_by_all() || self.replaces_sidecar()
    }

    /// Returns the ports of ztunnel, which a sidecar uses as well, that are still to be reserved. Best effort: a port that is not reserved is no
    /// difference from the plan.
    pub(crate) fn ports_to_reserve(&self, state: &State) -> Vec<u16> {
        let captures = self.tables.iter().any(Table::captures);
        let reserved = state.reserved_ports.as_ref().filter(|_| captures);
        let is_free = |port: &u16| reserved.is_some_and(|reserved| !reserved.contains(*port));
        let all = ZTUNNEL_PORTS.into_iter().chain([ZTUNNEL_DNS_PORT]);
        all.filter(is_free).collect()
    }

    pub(crate) fn with_new_only(self, new_only: Vec<Table>) -> Self {
        Self { new_only, ..self }
    }

    /// Returns the families whose DNS queries go to ztunnel.
    fn dns_families(&self) -> Vec<Family> {
        self.tables.iter().flat_map(dns_families).collect()
    }
}

fn fingerprint(tables: &[Table], routing: &[Need]) -> Fingerprint {
    let tables: String = tables.iter().map(ToString::to_string).collect();
    let routing = routing.iter();
    let routing: String = routing
        .map(|(family, part)| format!("{family} {part}\n"))
        .collect();
    Fingerprint::of(&format!("schema {SCHEMA}\n{tables}{routing}"))
}

/// Returns whether the state is exactly the state of a fingerprint, for any form and families.
pub(crate) fn is_intact(state: &State, tagged: Fingerprint) -> bool {
    matches_tag(state, tagged, |plan| plan.differences(state).is_empty())
}

/// Returns whether the state is intact, apart from items that the kernel drops while `lo` is down.
pub(crate) fn is_intact_except_loopback(state: &State, tagged: Fingerprint) -> bool {
    matches_tag(state, tagged, |plan| {
        let routing = state.routing.clone().with_loopback_items(&plan.routing);
        let completed = State {
            routing,
            ..state.clone()
        };
        plan.differences(&completed).is_empty()
    })
}

/// Returns whether one of the plans with the state's tables has the fingerprint and satisfies the predicate.
fn matches_tag(state: &State, tagged: Fingerprint, is_met: impl Fn(&Plan) -> bool) -> bool {
    let tables: Vec<_> = state.our_tables().cloned().collect();
    let bears_it = |form, families: &[Family]| {
        let plan = Plan::new(form, tables.clone(), families);
        plan.fingerprint == tagged && is_met(&plan)
    };
    let mut forms = Form::ALL.into_iter();
    forms.any(|form| bears_it(form, &[Family::V4]) || bears_it(form, &Family::ALL))
}
