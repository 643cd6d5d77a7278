//! Pods with an AWS branch ENI ("security groups for pods"; services/docs/facts/istio-ambient.md, 6.8). An ip rule of
//! AWS sends all packets to them out of the node, to return as foreign traffic. Two ip rules keep probes on the node:
//! one routes packets to the pod by its own route table, the other delivers its replies locally. Needed only where
//! `net.ipv4.tcp_early_demux` is 0, as AWS's agent sets it for probes of such pods.

mod kernel;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
};

use super::{ProbeSetError, settings::AwsBranchEni};
use crate::{
    family::Family,
    netlink::{KernelError, route::PROTOCOL},
};
use kernel::Kernel;

/// After AWS's rules for pods (10), before those for the node's other interfaces (1024 and 1536).
const TO_POD_PRIORITY: u32 = 512;

/// RT_TABLE_LOCAL and RT_TABLE_MAIN of linux/rtnetlink.h.
const LOCAL: u32 = 255;
const MAIN: u32 = 254;

/// Of the reading thread's netns.
const TCP_EARLY_DEMUX: &str = "/proc/sys/net/ipv4/tcp_early_demux";

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    family: Family,
    priority: u32,
    table: u32,
    protocol: u8,
    /// Input interface to match, if any.
    arrives_by: Option<String>,
    /// Destination to match, if any.
    to: Option<IpAddr>,
}

/// A route to a single address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    table: u32,
    to: IpAddr,
    interface: String,
}

/// The routing of an address's probes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Branch {
    table: u32,
    /// The node's end of the veth, and its rule's priority; `None` if that was not found.
    return_path: Option<(String, u32)>,
}

impl Branch {
    /// Returns them in the order of addition.
    fn rules(&self, address: IpAddr) -> Vec<Rule> {
        let family = Family::of(address);
        let to = Rule {
            family,
            priority: TO_POD_PRIORITY,
            table: self.table,
            protocol: PROTOCOL,
            arrives_by: None,
            to: Some(address),
        };
        let return_path = self.return_path.iter().map(|(veth, priority)| Rule {
            family,
            priority: *priority,
            table: LOCAL,
            protocol: PROTOCOL,
            arrives_by: Some(veth.clone()),
            to: None,
        });
        [to].into_iter().chain(return_path).collect()
    }
}

/// Finds the table that another agent's ip rule uses for packets from the interface by which that table routes the
/// address; `None` if there is none.
fn detect(address: IpAddr, rules: &[Rule], routes: &[Route]) -> Option<Branch> {
    let of_others = rules.iter().filter(|rule| {
        let is_own_table = !matches!(rule.table, LOCAL | MAIN);
        rule.family == Family::of(address) && rule.protocol != PROTOCOL && is_own_table
    });
    of_others.into_iter().find_map(|rule| {
        let veth = rule.arrives_by.as_ref()?;
        let mut routes = routes.iter();
        let leads = |route: &Route| {
            (route.table, route.to, &route.interface) == (rule.table, address, veth)
        };
        routes.any(leads).then(|| Branch {
            table: rule.table,
            return_path: Some((veth.clone(), rule.priority.saturating_sub(1))),
        })
    })
}

/// Recovers an earlier process's routing from its rules. The veth is known from AWS's rules, while these exist.
fn recover(rules: &[Rule]) -> BTreeMap<IpAddr, Branch> {
    let ours = rules.iter().filter(|rule| rule.protocol == PROTOCOL);
    let routed = ours.clone().filter_map(|to| {
        let is_back = |return_path: &&Rule| {
            let veths = rules.iter().filter(|rule| {
                (rule.family, rule.table) == (to.family, to.table) && rule.protocol != PROTOCOL
            });
            let mut veths = veths.filter_map(|rule| rule.arrives_by.as_ref());
            return_path.family == to.family
                && veths.any(|veth| return_path.arrives_by.as_ref() == Some(veth))
        };
        let return_path = ours.clone().find(is_back);
        let return_path = return_path
            .and_then(|return_path| Some((return_path.arrives_by.clone()?, return_path.priority)));
        let table = to.table;
        Some((to.to?, Branch { table, return_path }))
    });
    routed.collect()
}

/// Returns our rules for no routed address.
fn stale_rules(rules: &[Rule], routed: &BTreeMap<IpAddr, Branch>) -> Vec<Rule> {
    let families = routed
        .iter()
        .filter(|(_, branch)| branch.return_path.is_none());
    let uncertain: BTreeSet<_> = families.map(|(address, _)| Family::of(*address)).collect();
    let wanted: Vec<_> = routed
        .iter()
        .flat_map(|(address, branch)| branch.rules(*address))
        .collect();
    let ours = rules.iter().filter(|rule| rule.protocol == PROTOCOL);
    // A return rule without a known address may be for an address without a known return rule.
    let stale = ours.filter(|rule| {
        let may_be_needed = rule.to.is_none() && uncertain.contains(&rule.family);
        !wanted.contains(rule) && !may_be_needed
    });
    stale.cloned().collect()
}

#[derive(Debug)]
pub(super) struct Eni {
    kernel: Kernel,
    routed: BTreeMap<IpAddr, Branch>,
}

impl Eni {
    /// Recovers the routing of an earlier process.
    pub(super) fn open(setting: AwsBranchEni) -> io::Result<Option<Self>> {
        match setting {
            AwsBranchEni::Off => return Ok(None),
            AwsBranchEni::Auto => {}
        }
        let mut kernel = Kernel::open()?;
        let rules = kernel.rules().unwrap_or_else(|error| {
            tracing::warn!(%error, "Cannot read the ip rules of an earlier run");
            Vec::new()
        });
        let mut eni = Self {
            routed: recover(&rules),
            kernel,
        };
        if let Err(error) = eni.delete_stale(&rules) {
            tracing::warn!(%error, "Cannot delete stale ip rules for probes");
        }
        Ok(Some(eni))
    }

    /// Routes probes of current addresses where needed, and removes the rules of others. Returns
    /// whether anything was written.
    pub(super) fn update(
        &mut self,
        current: &BTreeSet<IpAddr>,
        gone: &BTreeSet<IpAddr>,
    ) -> Result<bool, ProbeSetError> {
        let mut changed = false;
        for address in gone {
            changed |= self.route(*address, None)?;
        }
        let is_enabled = is_enabled();
        let Some(first) = current.first().copied() else {
            return Ok(changed);
        };
        if !is_enabled
            && current
                .iter()
                .all(|address| !self.routed.contains_key(address))
        {
            return Ok(changed);
        }
        let read = |source| branch_error(first, source);
        let (rules, routes) = (
            self.kernel.rules().map_err(read)?,
            self.kernel.routes().map_err(read)?,
        );
        for address in current {
            let branch = detect(*address, &rules, &routes).filter(|_| is_enabled);
            self.forget_if_broken(*address, &rules);
            changed |= self.route(*address, branch)?;
        }
        Ok(changed)
    }

    /// Forgets rules deleted by others: they are added again.
    fn forget_if_broken(&mut self, address: IpAddr, rules: &[Rule]) {
        let is_there = |rule: &Rule| rules.contains(rule);
        let known = self.routed.get(&address);
        if known.is_some_and(|branch| !branch.rules(address).iter().all(is_there)) {
            self.routed.remove(&address);
        }
    }

    /// Returns whether the routing differed.
    fn route(&mut self, address: IpAddr, wanted: Option<Branch>) -> Result<bool, ProbeSetError> {
        if self.routed.get(&address) == wanted.as_ref() {
            return Ok(false);
        }
        let result = self.change(address, wanted);
        result.map_err(|source| branch_error(address, source))?;
        Ok(true)
    }

    /// Adds first, then deletes stale rules.
    fn change(&mut self, address: IpAddr, wanted: Option<Branch>) -> Result<(), KernelError> {
        match wanted {
            Some(branch) => {
                self.kernel.add(&branch.rules(address))?;
                self.routed.insert(address, branch);
            }
            None => drop(self.routed.remove(&address)),
        }
        let rules = self.kernel.rules()?;
        self.delete_stale(&rules)
    }

    fn delete_stale(&mut self, rules: &[Rule]) -> Result<(), KernelError> {
        self.kernel.delete(&stale_rules(rules, &self.routed))
    }
}

fn branch_error(address: IpAddr, source: KernelError) -> ProbeSetError {
    ProbeSetError::BranchEni { address, source }
}

/// Returns `false` where unreadable, since AWS's nodes have it.
fn is_enabled() -> bool {
    fs::read_to_string(TCP_EARLY_DEMUX).is_ok_and(|text| text.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn of_aws(table: u32, arrives_by: &str) -> Rule {
        Rule {
            family: Family::V4,
            priority: 10,
            table,
            protocol: 0,
            arrives_by: Some(arrives_by.to_owned()),
            to: None,
        }
    }

    fn route(table: u32, to: &str, interface: &str) -> Route {
        Route {
            table,
            to: ip(to),
            interface: interface.to_owned(),
        }
    }

    /// Returns two pods as AWS's agent routes them.
    fn node() -> (Vec<Rule>, Vec<Route>) {
        let rules = vec![
            of_aws(101, "vlan.eth.1"),
            of_aws(101, "vlana"),
            of_aws(102, "vlan.eth.2"),
            of_aws(102, "vlanb"),
        ];
        let routes = vec![
            route(101, "10.0.0.5", "vlana"),
            route(102, "10.0.0.6", "vlanb"),
            route(MAIN, "10.0.0.7", "eni7"),
        ];
        (rules, routes)
    }

    fn branch(table: u32, veth: &str) -> Branch {
        Branch {
            table,
            return_path: Some((veth.to_owned(), 9)),
        }
    }

    #[test]
    fn a_pod_is_led_by_its_own_table_and_its_own_veth() {
        let (rules, routes) = node();
        assert_eq!(
            detect(ip("10.0.0.5"), &rules, &routes),
            Some(branch(101, "vlana"))
        );
        assert_eq!(
            detect(ip("10.0.0.6"), &rules, &routes),
            Some(branch(102, "vlanb"))
        );
        let texts: Vec<_> = branch(101, "vlana")
            .rules(ip("10.0.0.5"))
            .iter()
            .map(|rule| (rule.priority, rule.table, rule.to.is_some()))
            .collect();
        assert_eq!(texts, [(512, 101, true), (9, LOCAL, false)]);
    }

    #[test]
    fn other_pods_are_not_led() {
        let (mut rules, mut routes) = node();
        assert_eq!(detect(ip("10.0.0.7"), &rules, &routes), None);
        assert_eq!(detect(ip("10.0.0.8"), &rules, &routes), None);
        // Main is no pod's table, and our rules are not AWS's.
        rules.push(of_aws(MAIN, "eni7"));
        rules.push(Rule {
            protocol: PROTOCOL,
            ..of_aws(103, "vlanc")
        });
        routes.push(route(103, "10.0.0.8", "vlanc"));
        assert_eq!(detect(ip("10.0.0.7"), &rules, &routes), None);
        assert_eq!(detect(ip("10.0.0.8"), &rules, &routes), None);
    }

    #[test]
    fn a_rule_of_the_highest_priority_has_none_ahead() {
        let (mut rules, routes) = node();
        rules[1].priority = 0;
        let found = detect(ip("10.0.0.5"), &rules, &routes).unwrap();
        assert_eq!(found.return_path, Some(("vlana".to_owned(), 0)));
    }

    #[test]
    fn what_an_earlier_run_led_is_known_by_its_rules() {
        let (mut rules, _) = node();
        let (a, b) = (branch(101, "vlana"), branch(102, "vlanb"));
        rules.extend(a.rules(ip("10.0.0.5")));
        rules.extend(b.rules(ip("10.0.0.6")));
        let routed = recover(&rules);
        assert_eq!(routed, [(ip("10.0.0.5"), a), (ip("10.0.0.6"), b)].into());
        assert_eq!(stale_rules(&rules, &routed), []);
    }

    #[test]
    fn a_way_back_is_kept_while_it_may_be_needed_and_goes_with_the_last_pod_that_may_need_it() {
        let a = branch(101, "vlana");
        // AWS's went with the pod.
        let rules = a.rules(ip("10.0.0.5"));
        let mut routed = recover(&rules);
        assert_eq!(routed[&ip("10.0.0.5")].return_path, None);
        assert_eq!(stale_rules(&rules, &routed), []);
        routed.clear();
        assert_eq!(stale_rules(&rules, &routed), rules);
    }

    #[test]
    fn a_veth_that_two_addresses_have_in_common_keeps_its_way_back() {
        let a = branch(101, "vlana");
        let mut rules = a.rules(ip("10.0.0.5"));
        rules.extend(a.rules(ip("10.0.0.9")).into_iter().take(1));
        let routed = [(ip("10.0.0.9"), a)].into();
        let stale_rules = stale_rules(&rules, &routed);
        assert_eq!(stale_rules.len(), 1);
        assert_eq!(stale_rules[0].to, Some(ip("10.0.0.5")));
    }
}
