//! The node around pod-events as plain data: what the source shows, sandboxes with their network namespaces, and the
//! states of netconfig, of the broker and of its ztunnel. The node outlives every run of pod-events.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_service::UninstallMode;
use inpod_types::{ContainerId, Failure, NetnsId, NetnsRef, Reason, SandboxRef, Workload, keys};
use tokio::sync::{Notify, mpsc, watch};

use crate::{
    inventory::Inventory,
    pod::{Pod, PodKey, ShownCondition},
    testing,
};

pub(super) const NAMES: [&str; 2] = ["web", "db"];

/// A call decided on outdated evidence may arrive with this delay.
const EVIDENCE_AGE: Duration = Duration::from_secs(15);

const MAX_CALLS_AT_ONCE: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Method {
    Claim,
    Release,
    ListClaims,
    Find,
    Apply,
    Verify,
    RemoveRules,
    Inspect,
    Listeners,
    AddWorkload,
    RemoveWorkload,
    SetWorkloads,
    ListWorkloads,
}

impl Method {
    pub(super) const ALL: [Self; 13] = [
        Self::Claim,
        Self::Release,
        Self::ListClaims,
        Self::Find,
        Self::Apply,
        Self::Verify,
        Self::RemoveRules,
        Self::Inspect,
        Self::Listeners,
        Self::AddWorkload,
        Self::RemoveWorkload,
        Self::SetWorkloads,
        Self::ListWorkloads,
    ];
}

/// The fault that the next call of a method meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// An error without an effect.
    Refused,
    /// The effect takes place and the answer is lost.
    AnswerLost,
    Hangs,
    /// The effect takes place and no answer comes.
    AnswerHangs,
    /// The effect takes place after the given milliseconds, even if the caller is gone.
    Late(u32),
    AnswerLate(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ztunnel {
    Answers,
    Silent,
    Refuses,
}

/// The file system of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    Works,
    /// Files can be removed, but not written.
    Full,
    ReadOnly,
}

/// The reaction of the API server to patches of annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patching {
    Works,
    Refused,
    /// The effect takes place, and the answer is an error of the server.
    AnswerLost,
    Hangs,
}

/// A pod object of the source.
#[derive(Clone, Debug, Default)]
pub(super) struct Object {
    pub(super) generation: u32,
    pub(super) shown: bool,
    pub(super) labelled: bool,
    pub(super) terminating: bool,
    pub(super) terminal: bool,
    /// The sandbox whose address the pod's status shows.
    pub(super) address_of: Option<usize>,
    pub(super) sidecar: bool,
    pub(super) annotation: Option<String>,
    pub(super) condition: Option<ShownCondition>,
}

impl Object {
    /// Returns whether peers see the pod as redirected.
    pub(super) fn is_announced(&self) -> bool {
        self.annotation.as_deref() == Some(keys::REDIRECTION_ENABLED)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    Complete,
    Draining,
    Torn,
}

#[derive(Clone, Debug)]
pub(super) struct Sandbox {
    pub(super) pod: usize,
    pub(super) generation: u32,
    pub(super) path: PathBuf,
    pub(super) is_mounted: bool,
    /// The sandbox's own process.
    pub(super) pause: bool,
    pub(super) app: bool,
    /// The pod is redirected to a sidecar, without ztunnel.
    pub(super) sidecar: bool,
    pub(super) rules: Option<Rules>,
    pub(super) flows: u32,
    pub(super) listeners_lost: bool,
    /// ztunnel has acknowledged the sandbox with its own netns.
    pub(super) acknowledged: bool,
    /// The sandbox has never had an ADD.
    pub(super) ran_before: bool,
    /// The number of ADDs that named the sandbox.
    pub(super) adds: u32,
    pub(super) unanswered_adds: u32,
    /// The outcome of the last ADD; `None` while an ADD is unanswered.
    pub(super) admitted: Option<bool>,
    /// A DEL or a GC has named the sandbox since the last ADD.
    pub(super) delete_requested: bool,
    /// Since the requested deletion, the source has at least once not shown the pod as running on.
    pub(super) end_confirmed: bool,
    /// pod-events has reported the sandbox enrolled since the pod is wanted in the mesh.
    pub(super) enrolled: bool,
    /// The time since which all evidence shows the sandbox alive.
    pub(super) protected_since: Option<Duration>,
    /// Counts how often anything but pod-events changed the state that was put in place for the sandbox.
    pub(super) disturbances: u32,
}

impl Sandbox {
    pub(super) fn exists(&self) -> bool {
        self.is_mounted || self.has_processes()
    }

    pub(super) fn has_processes(&self) -> bool {
        self.pause || self.app
    }

    /// The caller of the unanswered ADDs is gone.
    pub(super) fn give_up_adds(&mut self) {
        self.unanswered_adds = 0;
        self.admitted.get_or_insert(false);
    }
}

#[derive(Debug)]
pub(super) enum DriftEvent {
    State(SandboxRef, Option<Rules>),
    Released(SandboxRef, usize),
}

#[derive(Debug)]
pub(super) struct Netconfig {
    pub(super) instance: watch::Sender<u64>,
    pub(super) up_at: Duration,
    pub(super) claims: BTreeMap<SandboxRef, usize>,
    pub(super) watchers: Vec<mpsc::UnboundedSender<DriftEvent>>,
    /// The time until which a change occupies a sandbox's netns.
    pub(super) busy: BTreeMap<SandboxRef, Duration>,
}

#[derive(Debug)]
pub(super) struct Broker {
    pub(super) instance: watch::Sender<u64>,
    pub(super) up_at: Duration,
    pub(super) seeded: bool,
    pub(super) entries: BTreeMap<SandboxRef, Workload>,
    pub(super) tombstones: BTreeMap<SandboxRef, u64>,
    pub(super) ztunnel: Ztunnel,
    /// The netns in which ztunnel serves a pod, by the pod's UID.
    pub(super) serving: BTreeMap<String, (SandboxRef, NetnsId)>,
    pub(super) refused: BTreeSet<SandboxRef>,
    pub(super) changed: watch::Sender<()>,
    pub(super) watchers: Vec<mpsc::UnboundedSender<()>>,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) pods: Vec<Object>,
    pub(super) sandboxes: Vec<Sandbox>,
    pub(super) gap: bool,
    /// pod-events was started during the gap, and has seen no pod yet.
    pub(super) unlisted: bool,
    pub(super) inventory: watch::Sender<Arc<Inventory>>,
    pub(super) netconfig: Netconfig,
    pub(super) broker: Broker,
    pub(super) faults: Vec<(Method, Fault)>,
    pub(super) crash_in: Option<u32>,
    /// pod-events has crashed: its remaining work has no effect.
    pub(super) dead: bool,
    pub(super) crashed: Arc<Notify>,
    pub(super) disk: Disk,
    /// The pods come from an API server, whose annotations pod-events patches.
    pub(super) has_api_server: bool,
    pub(super) patching: Patching,
    pub(super) leave: watch::Sender<Option<UninstallMode>>,
    pub(super) trace: Option<Vec<String>>,
    pub(super) violation: Option<String>,
    pub(super) calls: u64,
    /// The time of the last call, and the number of calls at that time.
    busy_at: (Duration, u32),
    /// ADDs that were answered with the enrollment.
    pub(super) admitted: u64,
    /// Inspections that read more than processes or connections.
    pub(super) inspections: u64,
    pub(super) slowest_delete: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct SharedNode(Arc<Mutex<Node>>);

impl SharedNode {
    pub(super) fn new(is_traced: bool) -> Self {
        let node = Node {
            pods: vec![Object::default(); NAMES.len()],
            sandboxes: Vec::new(),
            gap: false,
            unlisted: false,
            inventory: watch::Sender::default(),
            netconfig: Netconfig {
                instance: watch::Sender::new(1),
                up_at: Duration::ZERO,
                claims: BTreeMap::new(),
                watchers: Vec::new(),
                busy: BTreeMap::new(),
            },
            broker: Broker {
                instance: watch::Sender::new(1),
                up_at: Duration::ZERO,
                seeded: false,
                entries: BTreeMap::new(),
                tombstones: BTreeMap::new(),
                ztunnel: Ztunnel::Answers,
                serving: BTreeMap::new(),
                refused: BTreeSet::new(),
                changed: watch::Sender::new(()),
                watchers: Vec::new(),
            },
            faults: Vec::new(),
            crash_in: None,
            dead: false,
            crashed: Arc::default(),
            disk: Disk::Works,
            has_api_server: false,
            patching: Patching::Works,
            leave: watch::Sender::default(),
            busy_at: (Duration::ZERO, 0),
            trace: is_traced.then(Vec::new),
            violation: None,
            calls: 0,
            admitted: 0,
            inspections: 0,
            slowest_delete: Duration::ZERO,
        };
        Self(Arc::new(Mutex::new(node)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Node> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides before each change of a checkpoint file whether the disk fails.
    pub(super) fn disk_fault(&self, removes: bool) -> Option<io::Result<()>> {
        let mut node = self.lock();
        if node.dead {
            return Some(Ok(()));
        }
        match node.disk {
            Disk::Full if !removes => return Some(Err(io::ErrorKind::StorageFull.into())),
            Disk::ReadOnly => return Some(Err(io::ErrorKind::ReadOnlyFilesystem.into())),
            Disk::Works | Disk::Full => {}
        }
        node.step();
        None
    }
}

pub(super) fn sandbox_ref(index: usize) -> SandboxRef {
    testing::sandbox(&format!("c{index}"))
}

pub(super) fn netns_id(index: usize) -> NetnsId {
    let index = u64::try_from(index).unwrap();
    NetnsId {
        device: 4,
        inode: 1000 + index,
        cookie: 1 + index,
    }
}

pub(super) fn address(index: usize) -> String {
    format!("10.0.0.{}", index + 1)
}

/// Returns the sandbox of a container id, or none for a record named after a pod's UID.
pub(super) fn index_of(container: &ContainerId) -> Option<usize> {
    container.as_str().strip_prefix('c')?.parse().ok()
}

pub(super) fn key(pod: usize) -> PodKey {
    ("shop".parse().unwrap(), NAMES[pod].parse().unwrap())
}

pub(super) fn uid(pod: usize, generation: u32) -> String {
    format!("uid-{}-{generation}", NAMES[pod])
}

impl Node {
    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let now = testing::since_boot().as_millis();
            trace.push(format!("{now:>9} ms  {}", line()));
        }
    }

    pub(super) fn violate(&mut self, what: impl Into<String>) {
        if self.dead {
            return;
        }
        let what = what.into();
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// Counts a call. Work repeated without a pause would occupy the node for ever.
    pub(super) fn count_call(&mut self) {
        self.calls += 1;
        let now = testing::since_boot();
        let (at, calls) = self.busy_at;
        self.busy_at = (now, if at == now { calls + 1 } else { 1 });
        if self.busy_at.1 > MAX_CALLS_AT_ONCE {
            self.violate("calls are repeated without a pause");
            self.dead = true;
            self.crashed.notify_one();
        }
    }

    /// Counts a point at which pod-events may crash.
    pub(super) fn step(&mut self) {
        if let Some(left) = self.crash_in {
            self.crash_in = left.checked_sub(1);
            if left == 0 {
                self.dead = true;
                self.note(|| "pod-events crashes".to_owned());
                self.crashed.notify_one();
            }
        }
    }

    /// Notes that a service has lost its state for every sandbox.
    pub(super) fn disturb(&mut self) {
        for sandbox in &mut self.sandboxes {
            sandbox.disturbances += 1;
        }
    }

    pub(super) fn take_fault(&mut self, method: Method) -> Option<Fault> {
        let at = self.faults.iter().position(|(known, _)| *known == method)?;
        Some(self.faults.remove(at).1)
    }

    /// Makes the source show the current state of the pods.
    pub(super) fn publish(&mut self) {
        let mut inventory = Inventory::default();
        let namespace = testing::namespace("shop");
        inventory
            .namespaces
            .insert(namespace.name.clone(), namespace);
        self.unlisted &= self.gap;
        for (index, object) in self.pods.iter().enumerate() {
            if !object.shown || self.unlisted {
                continue;
            }
            inventory.pods.insert(key(index), shown(index, object));
        }
        if self.gap {
            inventory.gaps = Arc::new(["a gap".to_owned()].into());
        }
        self.inventory.send_replace(Arc::new(inventory));
        self.review_protection();
    }

    /// Returns the sandbox created last for a pod object.
    pub(super) fn newest(&self, pod: usize) -> Option<usize> {
        let of_pod = |sandbox: &Sandbox| sandbox.pod == pod;
        self.sandboxes.iter().rposition(of_pod)
    }

    /// Returns whether the source shows the sandbox's pod without a requested end.
    pub(super) fn is_shown_alive(&self, index: usize) -> bool {
        let sandbox = &self.sandboxes[index];
        let pod = &self.pods[sandbox.pod];
        pod.shown && pod.generation == sandbox.generation && !pod.terminal && !pod.terminating
    }

    pub(super) fn is_wanted(&self, index: usize) -> bool {
        let pod = &self.pods[self.sandboxes[index].pod];
        self.is_shown_alive(index) && self.may_join(pod)
    }

    /// Returns whether a running pod belongs in the mesh.
    pub(super) fn may_join(&self, pod: &Object) -> bool {
        (pod.labelled || pod.sidecar) && !self.is_uninstalled()
    }

    pub(super) fn is_uninstalled(&self) -> bool {
        *self.leave.borrow() == Some(UninstallMode::Uninstall)
    }

    /// Records, for each sandbox, since when all evidence shows the sandbox alive.
    pub(super) fn review_protection(&mut self) {
        let now = testing::since_boot();
        for index in 0..self.sandboxes.len() {
            let is_newest = self.newest(self.sandboxes[index].pod) == Some(index);
            let (is_wanted, is_alive) = (self.is_wanted(index), self.is_shown_alive(index));
            let sandbox = &mut self.sandboxes[index];
            sandbox.enrolled &= is_wanted;
            sandbox.end_confirmed |= !is_alive;
            sandbox.end_confirmed &= sandbox.delete_requested;
            let stands = is_newest
                && is_wanted
                && sandbox.app
                && sandbox.is_mounted
                && sandbox.enrolled
                && sandbox.admitted == Some(true);
            let since = sandbox.protected_since.unwrap_or(now);
            sandbox.protected_since = stands.then_some(since);
        }
    }

    /// Returns whether nothing may take the sandbox out of the mesh.
    pub(super) fn is_protected(&self, index: usize) -> bool {
        let since = self.sandboxes[index].protected_since;
        since.is_some_and(|since| testing::since_boot() >= since + EVIDENCE_AGE)
    }

    pub(super) fn find_path(&self, netns: &NetnsRef) -> Result<usize, Failure> {
        let mounted = |sandbox: &Sandbox| sandbox.is_mounted && sandbox.path == netns.path;
        let Some(index) = self.sandboxes.iter().position(mounted) else {
            return Err(Failure::new(Reason::NetnsMissing, "no such path"));
        };
        let id = netns_id(index);
        let differs = |given: Option<u64>, own: u64| given.is_some_and(|given| given != own);
        if differs(netns.inode, id.inode) || differs(netns.cookie, id.cookie) {
            return Err(Failure::new(Reason::NetnsMismatch, "another netns"));
        }
        Ok(index)
    }

    pub(super) fn claimed(&self, sandbox: &SandboxRef) -> Result<usize, Failure> {
        let unknown = || Failure::new(Reason::ClaimUnknown, format!("no claim of {sandbox}"));
        self.netconfig
            .claims
            .get(sandbox)
            .copied()
            .ok_or_else(unknown)
    }

    pub(super) fn is_claimed(&self, index: usize) -> bool {
        self.netconfig.claims.values().any(|held| *held == index)
    }

    pub(super) fn send_drift(&mut self, event: impl Fn() -> DriftEvent) {
        self.netconfig
            .watchers
            .retain(|watcher| watcher.send(event()).is_ok());
    }

    pub(super) fn send_state(&mut self, index: usize) {
        let rules = self.sandboxes[index].rules;
        let held = self.netconfig.claims.iter();
        let held: Vec<_> = held
            .filter(|(_, held)| **held == index)
            .map(|(sandbox, _)| sandbox.clone())
            .collect();
        for sandbox in held {
            self.send_drift(|| DriftEvent::State(sandbox.clone(), rules));
        }
    }

    pub(super) fn release(&mut self, sandbox: &SandboxRef) -> bool {
        let Some(index) = self.netconfig.claims.remove(sandbox) else {
            return false;
        };
        self.send_drift(|| DriftEvent::Released(sandbox.clone(), index));
        true
    }

    /// Removes the rules, connections and claims that end with a netns. netconfig notices the end of a claimed netns.
    pub(super) fn end_netns(&mut self, index: usize) {
        let sandbox = &mut self.sandboxes[index];
        if sandbox.exists() {
            return;
        }
        (sandbox.rules, sandbox.flows) = (None, 0);
        let held = self.netconfig.claims.iter();
        let held: Vec<_> = held
            .filter(|(_, held)| **held == index)
            .map(|(sandbox, _)| sandbox.clone())
            .collect();
        for sandbox in held {
            self.release(&sandbox);
        }
    }

    /// Makes ztunnel serve the workloads that the broker desires, unless ztunnel is silent or refuses.
    pub(super) fn serve(&mut self) {
        let broker = &mut self.broker;
        if broker.seeded && broker.ztunnel != Ztunnel::Silent {
            let mut current: BTreeMap<&str, &Workload> = BTreeMap::new();
            for workload in broker.entries.values() {
                let known = current.entry(workload.uid.as_str()).or_insert(workload);
                if known.revision < workload.revision {
                    *known = workload;
                }
            }
            broker
                .serving
                .retain(|uid, _| current.contains_key(uid.as_str()));
            for (uid, workload) in current {
                let Some(netns) = workload.netns else {
                    continue;
                };
                let target = (workload.sandbox.clone(), netns);
                if broker.serving.get(uid) == Some(&target) {
                    continue;
                }
                if let Some((replaced, _)) = broker.serving.remove(uid)
                    && let Some(earlier) = index_of(&replaced.container_id)
                    && index_of(&workload.sandbox.container_id) > Some(earlier)
                {
                    self.sandboxes[earlier].disturbances += 1;
                }
                if broker.ztunnel == Ztunnel::Refuses {
                    broker.refused.insert(workload.sandbox.clone());
                    continue;
                }
                broker.refused.remove(&workload.sandbox);
                if let Some(index) = index_of(&workload.sandbox.container_id) {
                    let sandbox = &mut self.sandboxes[index];
                    sandbox.acknowledged |= netns == netns_id(index);
                    sandbox.listeners_lost = false;
                }
                broker.serving.insert(uid.to_owned(), target);
            }
        }
        broker.changed.send_replace(());
    }

    pub(super) fn is_served(&self, index: usize) -> bool {
        let mut serving = self.broker.serving.values();
        serving.any(|(_, netns)| *netns == netns_id(index))
    }
}

fn shown(index: usize, object: &Object) -> Pod {
    let mut pod = testing::pod("shop", NAMES[index]);
    pod.pod.uid = uid(index, object.generation).parse().unwrap();
    if object.labelled {
        let label = (keys::DATAPLANE_MODE.to_owned(), "ambient".to_owned());
        pod.labels.extend([label]);
    }
    pod.injection = object.sidecar.then(|| Arc::new(testing::injection()));
    pod.redirection.clone_from(&object.annotation);
    pod.in_mesh.clone_from(&object.condition);
    pod.terminal = object.terminal;
    pod.is_terminating = object.terminating;
    pod.addresses.extend(
        object
            .address_of
            .map(|of| address(of).parse::<IpAddr>().unwrap()),
    );
    pod
}
