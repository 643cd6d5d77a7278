//! Routes probes to pods with an AWS branch ENI ("security groups for pods"; services/docs/facts/istio-ambient.md, 6.8).
//! An ip rule of AWS sends all packets to such a pod out of the node, to return as foreign traffic. Two ip rules keep
//! probes on the node: the first routes packets to the pod by the pod's own routing table, the second delivers the
//! replies locally. The rules are needed only where `net.ipv4.tcp_early_demux` is 0, as AWS's agent sets the sysctl for
//! probes of such pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    net::IpAddr,
    os::unix::fs::FileExt as _,
};

use nix::{net::if_::if_indextoname, sys::socket::SockProtocol};

use super::settings::AwsBranchEni;
use crate::{
    family::Family,
    netlink::{
        KernelError, Socket,
        rt::{IpRule, LOCAL_TABLE, MAIN_TABLE, PROTOCOL, SeenRoute, SeenRule},
    },
};

/// The priority of inpod's rules that lead to a pod: after AWS's rules for pods (10), and before AWS's rules for the
/// node's other interfaces (1024 and 1536).
const TO_POD_PRIORITY: u32 = 512;

/// The priority of AWS's rules for pods.
const AWS_PRIORITY: u32 = 10;

/// The sysctl of the netns of the thread that opens the file.
const TCP_EARLY_DEMUX: &str = "/proc/sys/net/ipv4/tcp_early_demux";

/// A route to a pod's address through the node's end of the pod's veth.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VethRoute {
    table: u32,
    to: IpAddr,
    veth: String,
}

/// The routing of a pod's probes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Branch {
    table: u32,
    /// The name of the node's end of the pod's veth.
    veth: String,
    return_priority: u32,
}

impl Branch {
    /// Returns the rules in the order of addition.
    fn rules(&self, address: &IpAddr) -> [IpRule; 2] {
        let to = IpRule {
            family: Family::of(*address),
            priority: TO_POD_PRIORITY,
            table: self.table,
            protocol: PROTOCOL,
            mark: None,
            arrives_by: None,
            to: Some(*address),
        };
        let back = IpRule {
            priority: self.return_priority,
            table: LOCAL_TABLE,
            arrives_by: Some(self.veth.clone()),
            to: None,
            ..to.clone()
        };
        [to, back]
    }
}

/// Finds the routing of an address's probes. AWS's agent writes a route to the address into a table, and a rule that
/// looks up the table for packets from the same interface. If AWS's rule is missing, for example because another
/// program has deleted all rules, the known routing stays, or else the routing of an earlier process is taken from its
/// rule.
fn branch(
    address: &IpAddr,
    rules: &[IpRule],
    routes: &[VethRoute],
    known: Option<&Branch>,
) -> Option<Branch> {
    let of_table = |table: u32| {
        let family = Family::of(*address);
        let of_family = rules.iter().filter(move |rule| rule.family == family);
        of_family.filter(move |rule| rule.table == table)
    };
    let branch = |route: &VethRoute, aws_priority: u32| Branch {
        table: route.table,
        veth: route.veth.clone(),
        return_priority: aws_priority.saturating_sub(1),
    };
    let detected = |route: &VethRoute| {
        let mut of_others = of_table(route.table).filter(|rule| rule.protocol != PROTOCOL);
        let aws = of_others.find(|rule| rule.arrives_by.as_ref() == Some(&route.veth))?;
        Some(branch(route, aws.priority))
    };
    let recovered = |route: &VethRoute| {
        let mut own = of_table(route.table).filter(|rule| rule.protocol == PROTOCOL);
        own.any(|rule| rule.to == Some(*address))
            .then(|| branch(route, AWS_PRIORITY))
    };
    let to_address = || routes.iter().filter(|route| route.to == *address);
    let found = to_address().find_map(detected);
    let found = found.or_else(|| known.cloned());
    found.or_else(|| to_address().find_map(recovered))
}

/// The differences between the ip rules of the node and the rules that probes need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Difference {
    missing: Vec<IpRule>,
    surplus: Vec<IpRule>,
}

impl Difference {
    pub(super) fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.surplus.is_empty()
    }

    pub(super) fn sentences(&self) -> Vec<String> {
        let missing = self.missing.iter().map(|rule| describe(rule, "is missing"));
        let surplus = self.surplus.iter();
        let surplus = surplus.map(|rule| describe(rule, "is left over"));
        missing.chain(surplus).collect()
    }
}

fn describe(rule: &IpRule, state: &str) -> String {
    let IpRule {
        family,
        priority,
        table,
        arrives_by,
        to,
        ..
    } = rule;
    let from = arrives_by.iter().map(|veth| format!("iif {veth} "));
    let to = to.iter().map(|address| format!("to {address} "));
    let conditions: String = from.chain(to).collect();
    format!("the {family} ip rule `pref {priority} {conditions}lookup {table}` {state}")
}

/// Returns each rule once, in the order of addition.
fn wanted(branches: &BTreeMap<IpAddr, Branch>) -> Vec<IpRule> {
    let mut wanted = Vec::new();
    for rule in branches.iter().flat_map(|(address, it)| it.rules(address)) {
        if !wanted.contains(&rule) {
            wanted.push(rule);
        }
    }
    wanted
}

fn difference(rules: &[IpRule], wanted: &[IpRule]) -> Difference {
    let missing = wanted.iter().filter(|rule| !rules.contains(rule));
    let surplus = rules.iter().filter(|rule| is_own(rule));
    Difference {
        missing: missing.cloned().collect(),
        surplus: surplus
            .filter(|rule| !wanted.contains(rule))
            .cloned()
            .collect(),
    }
}

/// Returns whether this module has written the rule. The ip rules of a pod's redirection have a mark.
fn is_own(rule: &IpRule) -> bool {
    rule.protocol == PROTOCOL && rule.mark.is_none()
}

fn others(mut rules: Vec<IpRule>) -> Vec<IpRule> {
    rules.retain(|rule| !is_own(rule));
    rules
}

#[derive(Debug)]
pub(super) struct Eni {
    socket: Socket,
    /// The open sysctl [`TCP_EARLY_DEMUX`]; `None` if the kernel has none. Opening it takes longer with each netns of
    /// the node whose sysctls were looked up (`proc_sys_compare` in fs/proc/proc_sysctl.c).
    early_demux: Option<File>,
    branches: BTreeMap<IpAddr, Branch>,
    /// The rules of other programs at the last comparison.
    others: Vec<IpRule>,
    /// The rules of inpod that the node has, unless another program has deleted some. `None` before the first change:
    /// an earlier process wrote the rules for the addresses that are known then.
    written: Option<Vec<IpRule>>,
}

impl Eni {
    /// Opens a socket in the calling thread's netns. Returns `None` if the setting is off.
    pub(super) fn open(setting: AwsBranchEni) -> io::Result<Option<Self>> {
        match setting {
            AwsBranchEni::Off => Ok(None),
            AwsBranchEni::Auto => Ok(Some(Self {
                socket: Socket::open(SockProtocol::NetlinkRoute)?,
                early_demux: File::open(TCP_EARLY_DEMUX).ok(),
                branches: BTreeMap::new(),
                others: Vec::new(),
                written: None,
            })),
        }
    }

    /// Returns the addresses that rules of inpod route.
    pub(super) fn routed_addresses(&mut self) -> Result<Vec<IpAddr>, KernelError> {
        let rules = self.rules()?.into_iter();
        Ok(rules.filter(is_own).filter_map(|rule| rule.to).collect())
    }

    /// Compares the node's rules with the rules for the addresses. Sends no request to the kernel if the sysctl rules
    /// out pods with a branch ENI and no rule of inpod is left.
    pub(super) fn compare(
        &mut self,
        addresses: impl FnOnce() -> BTreeSet<IpAddr>,
    ) -> Result<Difference, KernelError> {
        let is_enabled = self.is_enabled();
        if !is_enabled && self.branches.is_empty() && self.written.is_some() {
            return Ok(Difference::default());
        }
        let addresses = addresses();
        let rules = self.rules()?;
        let routes = if is_enabled {
            self.routes(&addresses)?
        } else {
            Vec::new()
        };
        let known = &self.branches;
        let branches = addresses
            .iter()
            .filter(|_| is_enabled)
            .filter_map(|address| {
                let found = branch(address, &rules, &routes, known.get(address));
                Some((*address, found?))
            });
        self.branches = branches.collect();
        let difference = difference(&rules, &wanted(&self.branches));
        self.others = others(rules);
        Ok(difference)
    }

    /// Adds the missing rules, then deletes the surplus rules. Returns one sentence per rule that another program had
    /// deleted.
    pub(super) fn change(&mut self, difference: &Difference) -> Result<Vec<String>, KernelError> {
        for rule in &difference.missing {
            self.socket.add_rule("add an ip rule for probes", rule)?;
        }
        for rule in &difference.surplus {
            self.socket
                .delete_rule("delete an ip rule for probes", rule)?;
        }
        let before = self.written.replace(wanted(&self.branches));
        let was_written = |rule: &&IpRule| before.as_ref().is_none_or(|it| it.contains(rule));
        let lost = difference.missing.iter().filter(was_written);
        Ok(lost.map(|rule| describe(rule, "is missing")).collect())
    }

    /// Returns whether the rules of inpod differ from the wanted rules, or the rules of other programs have changed
    /// since the last comparison.
    pub(super) fn has_changed(&mut self) -> Result<bool, KernelError> {
        if self.branches.is_empty() {
            return Ok(false);
        }
        let rules = self.rules()?;
        let differs = !difference(&rules, &wanted(&self.branches)).is_empty();
        Ok(differs || self.others != others(rules))
    }

    /// Returns whether the sysctl is 0. An unreadable sysctl counts as not 0, because every node of AWS has the sysctl.
    fn is_enabled(&self) -> bool {
        let mut value = [0];
        let read = self
            .early_demux
            .as_ref()
            .map(|file| file.read_at(&mut value, 0));
        matches!(read, Some(Ok(1))) && value == *b"0"
    }

    fn rules(&mut self) -> Result<Vec<IpRule>, KernelError> {
        let mut found = Vec::new();
        for family in Family::ALL {
            let keep = |it: SeenRule| it.is_complete.then_some(it.rule);
            found.extend(self.socket.rules(family, usize::MAX, keep)?);
        }
        Ok(found)
    }

    /// Returns the routes to the addresses in tables of pods.
    fn routes(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<Vec<VethRoute>, KernelError> {
        let mut found = Vec::new();
        for family in Family::ALL {
            found.extend(
                self.socket
                    .routes(family, |SeenRoute { route, is_complete }| {
                        let to = route.to.filter(|to| addresses.contains(to))?;
                        let is_pods =
                            !route.is_local && !matches!(route.table, LOCAL_TABLE | MAIN_TABLE);
                        let name = if_indextoname(route.interface).ok()?;
                        let veth = name.to_str().ok()?.to_owned();
                        let table = route.table;
                        (is_complete && is_pods).then_some(VethRoute { table, to, veth })
                    })?,
            );
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn of_aws(table: u32, arrives_by: &str) -> IpRule {
        IpRule {
            family: Family::V4,
            priority: AWS_PRIORITY,
            table,
            protocol: 0,
            mark: None,
            arrives_by: Some(arrives_by.to_owned()),
            to: None,
        }
    }

    fn route(table: u32, to: &str, veth: &str) -> VethRoute {
        VethRoute {
            table,
            to: ip(to),
            veth: veth.to_owned(),
        }
    }

    fn expected(table: u32, veth: &str, return_priority: u32) -> Branch {
        Branch {
            table,
            veth: veth.to_owned(),
            return_priority,
        }
    }

    /// Returns two pods as AWS's agent routes them.
    fn node() -> (Vec<IpRule>, Vec<VethRoute>) {
        let names = [(101, "vlan.eth.1"), (101, "vlana"), (102, "vlanb")];
        let rules = names.map(|(table, name)| of_aws(table, name)).into();
        let routes = vec![
            route(101, "10.0.0.5", "vlana"),
            route(102, "10.0.0.6", "vlanb"),
        ];
        (rules, routes)
    }

    #[test]
    fn a_pod_is_routed_by_its_own_table_and_its_own_veth() {
        let (mut rules, routes) = node();
        let found = |rules: &[IpRule], address| branch(&ip(address), rules, &routes, None);
        assert_eq!(found(&rules, "10.0.0.5"), Some(expected(101, "vlana", 9)));
        assert_eq!(found(&rules, "10.0.0.6"), Some(expected(102, "vlanb", 9)));
        assert_eq!(found(&rules, "10.0.0.7"), None);
        rules[1].priority = 0;
        assert_eq!(found(&rules, "10.0.0.5"), Some(expected(101, "vlana", 0)));
        // The rules of inpod do not count as rules of AWS.
        rules[2].protocol = PROTOCOL;
        assert_eq!(found(&rules, "10.0.0.6"), None);
    }

    #[test]
    fn without_rules_of_aws_the_known_or_the_earlier_routing_holds() {
        let (rules, routes) = node();
        let address = ip("10.0.0.5");
        let known = branch(&address, &rules, &routes, None).unwrap();
        assert_eq!(
            branch(&address, &[], &[], Some(&known)),
            Some(known.clone())
        );
        let [own, _] = known.rules(&address);
        assert_eq!(branch(&address, &[own], &routes, None), Some(known));
        assert_eq!(branch(&address, &[], &routes, None), None);
    }

    #[test]
    fn rules_that_no_address_needs_are_surplus() {
        let (a, b) = (expected(101, "vlana", 9), expected(102, "vlanb", 9));
        let (first, second) = (ip("10.0.0.5"), ip("10.0.0.6"));
        let rules: Vec<_> = a
            .rules(&first)
            .into_iter()
            .chain(b.rules(&second))
            .collect();
        let both = [(first, a.clone()), (second, b)].into();
        assert_eq!(difference(&rules, &wanted(&both)), Difference::default());
        // Another address of the first pod still needs the way back.
        let moved = [(ip("10.0.0.9"), a)].into();
        assert_eq!(
            difference(&rules, &wanted(&moved)).sentences(),
            [
                "the IPv4 ip rule `pref 512 to 10.0.0.9 lookup 101` is missing",
                "the IPv4 ip rule `pref 512 to 10.0.0.5 lookup 101` is left over",
                "the IPv4 ip rule `pref 512 to 10.0.0.6 lookup 102` is left over",
                "the IPv4 ip rule `pref 9 iif vlanb lookup 255` is left over",
            ]
        );
    }
}
