//! Decides about the routing of a redirection. Per recipient and family, an ip rule and a routing table deliver marked
//! packets locally; each recipient has its own table, so that a missing route never hides another. A sidecar's
//! redirection also needs the IPv6 source address of the proxy's calls to the application.
//!
//! The numbers of table and priority are inpod's choice, per pod: a table that no other program uses, and a priority before
//! any foreign rule that could take the packets. The protocol of routes and rules shows which are inpod's, so netconfig
//! remembers neither number.

mod kernel;
#[cfg(test)]
mod tests;

pub(crate) use kernel::Routes;

use std::fmt;

use crate::{
    family::Family,
    marks::{
        FROM_PROXY, FROM_ZTUNNEL, ISTIO_PROXY_TABLE, ISTIO_RULE_PRIORITY, ISTIO_ZTUNNEL_TABLE,
        MAIN_RULE_PRIORITY, Mark, RULE_PRIORITY, TABLES, TO_PROXY, TO_ZTUNNEL,
    },
    netlink::rt::{IpRule, LOCAL_TABLE, LOOPBACK, PROTOCOL, Route, SeenRoute, SeenRule},
    rules::{Form, sidecar::PASSTHROUGH_V6},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipient {
    /// ztunnel, which receives replies in ambient mode.
    Ztunnel,
    /// A sidecar's proxy, which receives replies and packets captured by TPROXY.
    Proxy,
}

impl Recipient {
    const ALL: [Self; 2] = [Self::Ztunnel, Self::Proxy];

    /// Returns the mark that selects the recipient's table.
    const fn mark(self) -> Mark {
        match self {
            Self::Ztunnel => TO_ZTUNNEL,
            Self::Proxy => TO_PROXY,
        }
    }

    /// Returns the tables that inpod may use for the recipient.
    fn tables(self) -> impl Iterator<Item = u32> {
        let offset = match self {
            Self::Ztunnel => 0,
            Self::Proxy => 1,
        };
        TABLES.skip(offset).step_by(Self::ALL.len())
    }
}

impl fmt::Display for Recipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ztunnel => "ztunnel",
            Self::Proxy => "the proxy",
        })
    }
}

/// A part of the routing that a redirection needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The source address of the proxy's calls, for IPv6 only.
    Address,
    /// A default route to `lo`.
    Route(Recipient),
    /// An ip rule that looks up the recipient's table for packets with the recipient's mark.
    Rule(Recipient),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => write!(f, "address {PASSTHROUGH_V6}"),
            Self::Route(recipient) => write!(f, "route to {recipient}"),
            Self::Rule(recipient) => write!(f, "ip rule {} to {recipient}", recipient.mark()),
        }
    }
}

pub(crate) type Need = (Family, Part);

/// The order of addition, because an ip rule must not refer to an empty table.
const ORDER: [Part; 5] = [
    Part::Address,
    Part::Route(Recipient::Ztunnel),
    Part::Route(Recipient::Proxy),
    Part::Rule(Recipient::Ztunnel),
    Part::Rule(Recipient::Proxy),
];

/// Returns what a form needs, in the order of addition.
pub(crate) fn needed(form: Form, families: &[Family]) -> Vec<Need> {
    let of_part = |part| families.iter().map(move |family| (*family, part));
    let is_needed = |(family, part): &Need| match part {
        Part::Address => *family == Family::V6 && form != Form::Ambient,
        Part::Route(Recipient::Ztunnel) | Part::Rule(Recipient::Ztunnel) => form == Form::Ambient,
        Part::Route(Recipient::Proxy) | Part::Rule(Recipient::Proxy) => {
            form == Form::SidecarByTproxy
        }
    };
    let all = ORDER.into_iter().flat_map(of_part);
    all.filter(is_needed).collect()
}

/// An address, route or ip rule in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// `::6/128 dev lo`.
    Address,
    Route(Route),
    Rule(IpRule),
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => write!(f, "IPv6 address `{PASSTHROUGH_V6}/128 dev lo`"),
            Self::Route(route) => write!(f, "{} route `{}`", route.family, describe_route(route)),
            Self::Rule(rule) => write!(f, "{} ip rule `{}`", rule.family, describe_rule(rule)),
        }
    }
}

fn describe_route(route: &Route) -> String {
    format!("local default dev lo table {}", route.table)
}

fn describe_rule(rule: &IpRule) -> String {
    let mark = rule.mark.map(|mark| format!("fwmark {mark} "));
    let (priority, table) = (rule.priority, rule.table);
    format!("{}pref {priority} lookup {table}", mark.unwrap_or_default())
}

/// Renders a command of ip with the verb (add, del).
pub(crate) fn command(verb: &str, item: &Item) -> String {
    let ip = |family| match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    };
    match item {
        // The command has no protocol, since ip supports protocols of addresses only from iproute2 6.3.
        Item::Address => format!("ip -6 addr {verb} {PASSTHROUGH_V6}/128 dev lo"),
        Item::Route(route) => {
            let (ip, protocol) = (ip(route.family), route.protocol);
            format!(
                "{ip} route {verb} {} proto {protocol}",
                describe_route(route)
            )
        }
        Item::Rule(rule) => {
            let (ip, protocol) = (ip(rule.family), rule.protocol);
            format!(
                "{ip} rule {verb} {} protocol {protocol}",
                describe_rule(rule)
            )
        }
    }
}

/// Foreign routes or ip rules in the way of a redirection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Blocked {
    #[error(
        "foreign routes or ip rules use each of the routing tables {first} to {last}: {example}, for example"
    )]
    Tables {
        first: u32,
        last: u32,
        example: String,
    },
    #[error("the foreign {0} takes the packets to ztunnel or the proxy before any rule of inpod")]
    Rule(String),
}

/// The routes, ip rules and addresses of a netns that matter to redirections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routing {
    rules: Vec<SeenRule>,
    routes: Vec<SeenRoute>,
    /// The protocol of the address, 0 if unknown.
    address: Option<u8>,
    /// True if the kernel reports the protocol of addresses.
    reports_protocols: bool,
}

impl Routing {
    /// Decides about table and priority of what is needed, in the order of addition.
    pub(crate) fn items(&self, needs: &[Need]) -> Result<Vec<Item>, Blocked> {
        needs.iter().map(|need| self.item(*need)).collect()
    }

    fn item(&self, (family, part): Need) -> Result<Item, Blocked> {
        Ok(match part {
            Part::Address => Item::Address,
            Part::Route(recipient) => Item::Route(Route {
                family,
                table: self.table(recipient)?,
                protocol: PROTOCOL,
                is_local: true,
                to: None,
                interface: LOOPBACK,
            }),
            Part::Rule(recipient) => Item::Rule(IpRule {
                family,
                priority: self.priority(family, recipient)?,
                table: self.table(recipient)?,
                protocol: PROTOCOL,
                mark: Some(recipient.mark()),
                arrives_by: None,
                to: None,
            }),
        })
    }

    /// Returns the table of inpod's rules, unless another program uses the table, or the first free table.
    fn table(&self, recipient: Recipient) -> Result<u32, Blocked> {
        let is_free = |table: &u32| self.foreign_use(*table).is_none();
        let is_used = |table: &u32| {
            self.rules
                .iter()
                .any(|it| is_own(it) && it.rule.table == *table)
        };
        let mut used = recipient.tables().filter(is_used);
        let table = used
            .find(is_free)
            .or_else(|| recipient.tables().find(is_free));
        table.ok_or_else(|| Blocked::Tables {
            first: *TABLES.start(),
            last: *TABLES.end(),
            example: self.foreign_use(*TABLES.start()).unwrap_or_default(),
        })
    }

    /// Describes a foreign route in a table, or a foreign rule that looks up the table.
    fn foreign_use(&self, table: u32) -> Option<String> {
        let mut routes = self.routes.iter().filter(|it| it.route.table == table);
        let route = routes.find(|it| !is_own_route(it)).map(|it| {
            let family = it.route.family;
            format!("an {family} route in table {table}")
        });
        let mut rules = self.rules.iter().filter(|it| it.rule.table == table);
        let rule = || rules.find(|it| !is_own(it)).map(describe_foreign);
        route.or_else(rule)
    }

    /// Returns the priority of inpod's rule if no foreign rule comes first, or one before all foreign rules.
    fn priority(&self, family: Family, recipient: Recipient) -> Result<u32, Blocked> {
        let is_in_way = |it: &&SeenRule| it.rule.family == family && takes(it, recipient.mark());
        let foreign = self.rules.iter().filter(is_in_way);
        let Some(first) = foreign.min_by_key(|it| it.rule.priority) else {
            return Ok(self.own_priority(family, recipient, u32::MAX));
        };
        let limit = first.rule.priority;
        if limit == 0 && is_unconditional(first, recipient.mark()) {
            return Err(Blocked::Rule(describe_foreign(first)));
        }
        Ok(self.own_priority(family, recipient, limit))
    }

    /// Returns the priority of inpod's rule if the number is below the limit, or the default below the limit.
    fn own_priority(&self, family: Family, recipient: Recipient, limit: u32) -> u32 {
        let own = self.rules.iter().filter(|it| is_own(it));
        let own =
            own.filter(|it| (it.rule.family, it.rule.mark) == (family, Some(recipient.mark())));
        let mut priorities = own.map(|it| it.rule.priority);
        let kept = priorities.find(|priority| *priority < limit.min(RULE_PRIORITY + 1));
        kept.unwrap_or_else(|| RULE_PRIORITY.min(limit.saturating_sub(1)))
    }

    pub(crate) fn has(&self, item: &Item) -> bool {
        match item {
            Item::Address => self.address.is_some(),
            Item::Route(route) => self
                .routes
                .iter()
                .any(|it| it.is_complete && it.route == *route),
            Item::Rule(rule) => self
                .rules
                .iter()
                .any(|it| it.is_complete && it.rule == *rule),
        }
    }

    /// Returns whether the address exists with another protocol than inpod's.
    pub(crate) fn has_foreign_address(&self) -> bool {
        self.reports_protocols && self.address.is_some_and(|protocol| protocol != PROTOCOL)
    }

    pub(crate) fn leads_to_ztunnel(&self, family: Family) -> bool {
        let mut own = self.rules.iter().filter(|it| is_own(it));
        own.any(|it| (it.rule.family, it.rule.mark) == (family, Some(TO_ZTUNNEL)))
    }

    /// Returns inpod's items in the order of deletion, since no ip rule may refer to an empty table. If the kernel
    /// does not report protocols, the address counts as inpod's if inpod's tables use the address.
    pub(crate) fn own_items(&self, uses_address: bool) -> Vec<Item> {
        let rules = self.rules.iter().filter(|it| is_own(it)).map(to_rule);
        let routes = self
            .routes
            .iter()
            .filter(|it| is_own_route(it))
            .map(to_route);
        let may_be_own = !self.reports_protocols && uses_address;
        let address = self.address.filter(|it| *it == PROTOCOL || may_be_own);
        let address = address.map(|_| Item::Address);
        rules.chain(routes).chain(address).collect()
    }

    /// Returns the routing of Istio's node agent, in the order of deletion.
    pub(crate) fn agent_items(&self) -> Vec<Item> {
        let is_agents = |it: &&SeenRule| {
            let is_it = it.rule.mark == Some(TO_ZTUNNEL) && it.rule.priority == ISTIO_RULE_PRIORITY;
            is_it && is_foreign(it, ISTIO_ZTUNNEL_TABLE)
        };
        self.foreign_items(ISTIO_ZTUNNEL_TABLE, is_agents)
    }

    /// Returns the routing of Istio's sidecar installer, in the order of deletion. Its rules compare the whole mark, and
    /// each run adds another rule (services/docs/facts/istio-sidecar.md, 4.4.2).
    pub(crate) fn sidecar_items(&self) -> Vec<Item> {
        let is_installers = |it: &&SeenRule| {
            it.rule.mark == Some(FROM_PROXY.whole()) && is_foreign(it, ISTIO_PROXY_TABLE)
        };
        self.foreign_items(ISTIO_PROXY_TABLE, is_installers)
    }

    /// Returns the rules, and the local default routes in their table in families with such a rule.
    fn foreign_items(&self, table: u32, is_wanted: impl Fn(&&SeenRule) -> bool) -> Vec<Item> {
        let rules: Vec<_> = self.rules.iter().filter(is_wanted).collect();
        let has_rule = |family| rules.iter().any(|it| it.rule.family == family);
        let routes = self.routes.iter().filter(|it| {
            it.route.table == table && leads_to_loopback(it) && has_rule(it.route.family)
        });
        let routes = routes.filter(|it| !is_own_route(it)).map(to_route);
        rules.iter().copied().map(to_rule).chain(routes).collect()
    }

    /// Returns the foreign ip rules that route packets of ztunnel before the main table.
    pub(crate) fn rules_for_ztunnel(&self) -> Vec<&IpRule> {
        let matches = |mark| FROM_ZTUNNEL.matches(mark);
        let marked = self
            .rules
            .iter()
            .filter(|it| it.rule.mark.is_some_and(matches));
        let first = marked.filter(|it| takes(it, FROM_ZTUNNEL));
        first.map(|it| &it.rule).collect()
    }

    /// Returns the routing with an added item.
    pub(crate) fn with(mut self, item: &Item) -> Self {
        match item {
            Item::Address => self.address = Some(PROTOCOL),
            Item::Route(route) => self.routes.push(SeenRoute {
                route: *route,
                is_complete: true,
            }),
            Item::Rule(rule) => self.rules.push(SeenRule {
                rule: rule.clone(),
                is_complete: true,
            }),
        }
        self
    }

    /// Completes the items that the kernel drops while `lo` is down.
    pub(crate) fn with_loopback_items(mut self, needs: &[Need]) -> Self {
        for item in self.items(needs).unwrap_or_default() {
            let is_dropped = match item {
                Item::Route(_) => !self.has(&item),
                Item::Address => self.address.is_none(),
                Item::Rule(_) => false,
            };
            if is_dropped {
                self = self.with(&item);
            }
        }
        self
    }
}

/// Returns whether the rule matters to redirections. The rules of the kernel for local, main and default do not.
fn is_relevant(seen: &SeenRule) -> bool {
    let marks = [TO_ZTUNNEL, TO_PROXY, FROM_ZTUNNEL];
    is_own(seen)
        || TABLES.contains(&seen.rule.table)
        || marks.into_iter().any(|mark| takes(seen, mark))
}

/// Returns whether the route matters to redirections.
fn is_relevant_route(seen: &SeenRoute) -> bool {
    let tables = [ISTIO_ZTUNNEL_TABLE, ISTIO_PROXY_TABLE];
    TABLES.contains(&seen.route.table)
        || is_own_route(seen)
        || (tables.contains(&seen.route.table) && leads_to_loopback(seen))
}

/// Returns whether the rule selects exactly the packets with a recipient's mark, and has inpod's protocol.
fn is_own(seen: &SeenRule) -> bool {
    let rule = &seen.rule;
    let marks = Recipient::ALL.map(|recipient| Some(recipient.mark()));
    rule.protocol == PROTOCOL && marks.contains(&rule.mark) && selects_by_mark(seen)
}

fn selects_by_mark(seen: &SeenRule) -> bool {
    seen.is_complete && seen.rule.arrives_by.is_none() && seen.rule.to.is_none()
}

/// Returns whether a rule of another program selects by mark alone and looks up the table.
fn is_foreign(seen: &SeenRule, table: u32) -> bool {
    !is_own(seen) && selects_by_mark(seen) && seen.rule.table == table
}

/// Returns whether a foreign rule can route packets with the mark before the main table does.
fn takes(seen: &SeenRule, mark: Mark) -> bool {
    let rule = &seen.rule;
    let can_match = rule.mark.is_none_or(|condition| mark.meets(condition));
    !is_own(seen) && can_match && rule.table != LOCAL_TABLE && rule.priority < MAIN_RULE_PRIORITY
}

/// Returns whether a rule takes all packets with the mark.
fn is_unconditional(seen: &SeenRule, mark: Mark) -> bool {
    let condition = seen.rule.mark;
    selects_by_mark(seen) && condition.is_none_or(|condition| mark.meets(condition))
}

fn is_own_route(seen: &SeenRoute) -> bool {
    seen.route.protocol == PROTOCOL && leads_to_loopback(seen)
}

/// Returns whether a route is a local default route to `lo`.
fn leads_to_loopback(seen: &SeenRoute) -> bool {
    let route = &seen.route;
    seen.is_complete && route.is_local && route.to.is_none() && route.interface == LOOPBACK
}

fn to_rule(seen: &SeenRule) -> Item {
    Item::Rule(seen.rule.clone())
}

fn to_route(seen: &SeenRoute) -> Item {
    Item::Route(seen.route)
}

fn describe_foreign(seen: &SeenRule) -> String {
    let family = seen.rule.family;
    format!("{family} ip rule `{}`", describe_rule(&seen.rule))
}
