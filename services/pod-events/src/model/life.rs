//! Plays a schedule: runs of pod-events, one after the other, on one [`Node`](super::node::Node).

#![expect(
    clippy::wildcard_enum_match_arm,
    clippy::too_many_lines,
    reason = "one short arm for each operation of a schedule, in the function that handles it"
)]

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs, panic,
    path::{Path, PathBuf},
    process,
    sync::{Arc, Once, mpsc},
    thread,
    time::Duration,
};

use inpod_proto::{
    failure_of,
    netconfig::v1::netconfig_service_server::NetconfigServiceServer,
    podevents::v1::{self as wire, pod_events_service_server::PodEventsService as _},
    types::v1 as types,
    ztunnelbroker::v1::ztunnel_broker_service_server::ZtunnelBrokerServiceServer,
};
use inpod_service::{Readiness, Shutdown, Trace, UninstallMode};
use inpod_types::NetnsRef;
use tokio::{
    runtime::Builder,
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tonic::Request;

use super::{
    api_server,
    node::{
        Disk, NAMES, Object, Patching, Rules, Sandbox, SharedNode, Ztunnel, address, index_of, key,
        netns_id, sandbox_ref, uid,
    },
    oracle,
    schedule::Op,
    services::Services,
};
use crate::{
    adoption::Adoption,
    annotations,
    boottime::BootInstant,
    checkpoint::Checkpoint,
    clients::Clients,
    config::Config,
    follow_source,
    inventory::Changes,
    leave_mode::LeaveMode,
    metrics::Metrics,
    server::Server,
    source::Source,
    status::StatusReporter,
    sync::Sync,
    tasks::{AddCall, OfflineAdd, Registry, ReplayOutcome, Shared, Synced},
    testing::{self, Transport, set_disk_fault, set_since_boot, since_boot},
};

pub(super) const STATES: [&str; 9] = [
    "none",
    "out",
    "enrolling",
    "adopted",
    "enrolled",
    "announcing",
    "leaving",
    "draining",
    "deleting",
];

/// A DEL waits for a background enrollment that netconfig does not answer, for the undo of the enrollment, and for the
/// DEL's own calls.
const DELETE_LIMIT: Duration = Duration::from_secs(25);

/// The time between a crash and the next start: revisions come from the boot clock, which stands still in paused time.
const RESTART_TIME: Duration = Duration::from_millis(1);

/// A schedule takes a few milliseconds.
const BUSY_LIMIT: Duration = Duration::from_secs(60);

/// The times, in seconds after the faults have stopped, when rest is checked: they lie past every bound of pod-events.
const REST: [u64; 9] = [1, 4, 15, 45, 80, 200, 400, 400, 400];

/// Pairs of a record's state and an event that met the state, and counts of other effects.
#[derive(Clone, Debug, Default)]
pub(super) struct Reached {
    pub(super) pairs: BTreeMap<(&'static str, &'static str), u64>,
    pub(super) calls: u64,
    pub(super) crashes: u64,
    pub(super) enrolled: u64,
    /// Inspections of everything in a netns.
    pub(super) inspections: u64,
    pub(super) slowest_delete: Duration,
}

impl Reached {
    pub(super) fn add(&mut self, other: &Self) {
        for (pair, count) in &other.pairs {
            *self.pairs.entry(*pair).or_default() += count;
        }
        self.calls += other.calls;
        self.crashes += other.crashes;
        self.enrolled += other.enrolled;
    }
}

pub(super) struct Played {
    pub(super) violation: Option<String>,
    pub(super) trace: Vec<String>,
    pub(super) reached: Reached,
}

/// A plugin event missed by pod-events.
#[derive(Clone)]
enum Missed {
    Admitted(usize, Box<OfflineAdd>),
    Ended(usize),
}

struct Driver<'a> {
    node: SharedNode,
    directory: &'a Path,
    ops: std::slice::Iter<'a, Op>,
    /// The operations that pod-events misses before its next run.
    missed: usize,
    spool: Vec<Missed>,
    boot: Duration,
    /// The sandbox last added for each pod, and its ADDs.
    calls: BTreeMap<usize, (usize, Vec<JoinHandle<()>>)>,
    reached: Reached,
}

/// A run of pod-events.
struct Run {
    node: SharedNode,
    registry: Registry,
    server: Arc<Server>,
    /// Closed with the run.
    _synced: watch::Receiver<Synced>,
    _shutdown: watch::Sender<bool>,
}

thread_local! {
    static DIRECTORY: RefCell<Option<(tempfile::TempDir, Config)>> = const { RefCell::new(None) };
    static HAS_PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// Watches for panics, because pod-events restarts a panicked task and the panic may go unnoticed.
fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            HAS_PANICKED.set(true);
            usual(panic);
        }));
    });
    HAS_PANICKED.set(false);
}

/// Runs in memory-backed storage where the host has some, because the checkpoint's files are on tmpfs, too.
fn with_directory<T>(play: impl FnOnce(&Path, &Config) -> T) -> T {
    DIRECTORY.with_borrow_mut(|known| {
        let (directory, config) = known.get_or_insert_with(|| {
            let memory = tempfile::tempdir_in("/dev/shm");
            let directory = memory.or_else(|_| tempfile::tempdir()).unwrap();
            let mut config = testing::config(directory.path());
            config.plugin_state_dir = directory.path().join("plugin");
            (directory, config)
        });
        for path in ["pods", "inherited"].map(|name| directory.path().join(name)) {
            // Before the first schedule, the path is missing.
            drop(fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path)));
        }
        play(directory.path(), config)
    })
}

/// Ends the process unless the returned sender is dropped in time. Paused time stands still while a task is busy, so a
/// task that never rests would go unnoticed.
fn watch_end(ops: &[Op]) -> mpsc::Sender<()> {
    let (sender, ended) = mpsc::channel();
    let ops = ops.to_vec();
    thread::spawn(move || {
        if ended.recv_timeout(BUSY_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a task never rests in {ops:#?}");
            process::abort();
        }
    });
    sender
}

pub(super) fn play(ops: &[Op], is_traced: bool) -> Played {
    fastrand::seed(7);
    watch_panics();
    let _watched = watch_end(ops);
    with_directory(|directory, config| {
        let node = SharedNode::new(is_traced);
        let disk = node.clone();
        set_disk_fault(move |removes| disk.disk_fault(removes));
        node.lock().has_api_server = ops.contains(&Op::ApiServer);
        let mut driver = Driver {
            node,
            directory,
            ops: ops.iter(),
            missed: 0,
            spool: Vec::new(),
            boot: Duration::from_secs(10_000),
            calls: BTreeMap::new(),
            reached: Reached::default(),
        };
        loop {
            let builder = Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build();
            let has_crashed = builder.unwrap().block_on(driver.live(config));
            if !has_crashed || driver.node.lock().violation.is_some() {
                break;
            }
            driver.reached.crashes += 1;
            let mut node = driver.node.lock();
            node.unlisted = node.gap;
            node.publish();
        }
        set_disk_fault(|_| None);
        let mut node = driver.node.lock();
        if HAS_PANICKED.get() {
            node.violation = Some("a task has panicked".to_owned());
        }
        (driver.reached.calls, driver.reached.enrolled) = (node.calls, node.admitted);
        driver.reached.inspections = node.inspections;
        driver.reached.slowest_delete = node.slowest_delete;
        Played {
            violation: node.violation.take(),
            trace: node.trace.take().unwrap_or_default(),
            reached: driver.reached,
        }
    })
}

impl Run {
    async fn start(node: &SharedNode, directory: &Path, config: &Config) -> Self {
        let (inventory, (_, health)) = {
            let node = node.lock();
            (node.inventory.subscribe(), watch::channel(Some(Ok(()))))
        };
        let services = Services(node.clone());
        let netconfig = Transport::in_process(NetconfigServiceServer::new(services.clone()));
        let broker = Transport::in_process(ZtunnelBrokerServiceServer::new(services));
        let checkpoint = Checkpoint::open(&directory.join("pods")).unwrap();
        let records = checkpoint.load().unwrap();
        let (synced_sender, synced) = watch::channel(Synced::default());
        let source = Source::in_memory(inventory, health.clone());
        let (has_api_server, leave) = {
            let node = node.lock();
            (node.has_api_server, node.leave.subscribe())
        };
        let status = if has_api_server {
            StatusReporter::new(api_server::client(node), &source, &config.node_name)
        } else {
            StatusReporter::disabled()
        };
        let shared = Arc::new(Shared::new(
            config.clone(),
            source,
            status,
            LeaveMode::manual(leave),
            Clients::new(netconfig, broker, testing::capture()),
            checkpoint,
            synced.clone(),
        ));
        let registry = Registry::new(Arc::clone(&shared), records);
        let conditions = Readiness::default();
        let mut metrics = prometheus_client::registry::Registry::default();
        let metrics = Metrics::register(&mut metrics, &registry, &shared);
        let adoption = Adoption::open(directory.join("inherited"));
        let adopted = adoption.completed();
        annotations::start(&shared, &registry, &conditions, adopted);
        let clients = shared.clients().clone();
        let before = (adoption, health);
        Sync::start(
            clients,
            registry.clone(),
            shared.status.clone(),
            conditions.clone(),
            synced_sender,
            before,
        );
        tokio::spawn(follow_source(shared.source.changes(), registry.clone()));
        let (stop, shutdown) = Shutdown::manual();
        let server = Server {
            registry: registry.clone(),
            shared,
            conditions,
            metrics,
            version: "0",
            instance_id: String::new(),
            shutdown,
        };
        Self {
            node: node.clone(),
            registry,
            server: Arc::new(server),
            _synced: synced,
            _shutdown: stop,
        }
    }

    /// Reacts to a changed leave mode as the uninstaller does.
    fn change_leave_mode(&self) {
        self.registry.evaluate(&Changes::to_everything());
    }

    fn state(&self, index: usize) -> &'static str {
        let record = self.registry.record(&sandbox_ref(index));
        record.map_or("none", |record| oracle::state_of(&record.intent))
    }

    /// Handles the answer to an ADD like the runtime: starts the containers or deletes the sandbox.
    async fn add(self: Arc<Self>, index: usize, call: Add) {
        let mut request = Request::new(self.add_request(index));
        request.set_timeout(Duration::from_secs(call.timeout));
        {
            let mut node = self.node.lock();
            let sandbox = &mut node.sandboxes[index];
            sandbox.admitted = None;
            sandbox.adds += 1;
            sandbox.unanswered_adds += 1;
            node.review_protection();
        }
        let before = oracle::disturbances(&self.node, index);
        let had_rules = self.node.lock().sandboxes[index].rules.is_some();
        let answer = self.server.add_pod(request);
        let limit = call
            .leaves_after
            .map_or(Duration::MAX / 4, Duration::from_millis);
        let answer = if call.leaves_after.is_some() {
            timeout(limit, answer).await.ok()
        } else {
            Some(answer.await)
        };
        if self.node.lock().dead {
            return std::future::pending().await;
        }
        let is_undisturbed = oracle::disturbances(&self.node, index) == before;
        let is_last = {
            let mut node = self.node.lock();
            node.note(|| format!("ADD c{index}: {}", describe(&answer)));
            let unanswered = &mut node.sandboxes[index].unanswered_adds;
            *unanswered -= 1;
            *unanswered == 0
        };
        if let Some(Ok(added)) = answer {
            let enrollment = added.get_ref().enrollment();
            if is_undisturbed {
                oracle::check_admitted(&self.node, &self.registry, index, enrollment);
            }
            self.admit(index, enrollment);
        } else if is_last {
            self.node.lock().sandboxes[index].admitted = Some(false);
            if answer.is_some() && is_undisturbed && !had_rules {
                oracle::check_forgotten(&self.node, &self.registry, index, "failed ADD");
            }
            if call.cleans_up {
                self.delete(index).await;
                self.unmount(index);
            }
        }
        oracle::check_moment(&self.node, &self.registry);
    }

    fn add_request(&self, index: usize) -> wire::AddPodRequest {
        let node = self.node.lock();
        let sandbox = &node.sandboxes[index];
        wire::AddPodRequest {
            sandbox: Some((&sandbox_ref(index)).into()),
            pod: Some(types::PodSelector {
                namespace: "shop".to_owned(),
                name: NAMES[sandbox.pod].to_owned(),
                uid: uid(sandbox.pod, sandbox.generation),
            }),
            netns: Some((&seen_netns(&sandbox.path, index)).into()),
            addresses: vec![address(index)],
        }
    }

    fn admit(&self, index: usize, enrollment: types::Enrollment) {
        let mut node = self.node.lock();
        let sandbox = &mut node.sandboxes[index];
        (sandbox.admitted, sandbox.delete_requested) = (Some(true), false);
        sandbox.app = sandbox.is_mounted && sandbox.pause;
        let (pod, generation) = (sandbox.pod, sandbox.generation);
        let is_ambient = enrollment == types::Enrollment::Ambient;
        sandbox.enrolled |= is_ambient || enrollment == types::Enrollment::Sidecar;
        node.admitted += u64::from(is_ambient);
        if node.pods[pod].generation == generation && node.sandboxes[index].app {
            node.pods[pod].address_of = Some(index);
        }
        node.publish();
    }

    fn unmount(&self, index: usize) {
        let mut node = self.node.lock();
        let sandbox = &mut node.sandboxes[index];
        (sandbox.app, sandbox.pause, sandbox.is_mounted) = (false, false, false);
        sandbox.disturbances += 1;
        node.end_netns(index);
        node.review_protection();
    }

    async fn delete(&self, index: usize) {
        let unanswered_add = {
            let mut node = self.node.lock();
            let sandbox = &mut node.sandboxes[index];
            sandbox.delete_requested = true;
            sandbox.disturbances += 1;
            let unanswered_add = sandbox.admitted.is_none().then_some(sandbox.adds);
            node.review_protection();
            unanswered_add
        };
        let began = Instant::now();
        let request = Request::new(wire::DeletePodRequest {
            sandbox: Some((&sandbox_ref(index)).into()),
            ..wire::DeletePodRequest::default()
        });
        let deferred = self
            .server
            .delete_pod(request)
            .await
            .unwrap()
            .into_inner()
            .deferred;
        let took = began.elapsed();
        let mut node = self.node.lock();
        node.slowest_delete = node.slowest_delete.max(took);
        node.note(|| format!("DEL c{index}: deferred {deferred}, took {took:?}"));
        if took > DELETE_LIMIT {
            node.violate(format!("the DEL of c{index} took {} s", took.as_secs()));
        }
        let sandbox = &node.sandboxes[index];
        if sandbox.admitted.is_none() && unanswered_add == Some(sandbox.adds) {
            node.violate(format!("the DEL of c{index} was answered before its ADD"));
        }
        drop(node);
        if !deferred {
            oracle::check_forgotten(&self.node, &self.registry, index, "DEL");
        }
    }

    /// Adds the other pod with the sandbox's container: pod-events refuses such an ADD and changes nothing.
    async fn confuse(&self, index: usize) {
        let Some(before) = self.registry.record(&sandbox_ref(index)) else {
            return;
        };
        let selector = {
            let node = self.node.lock();
            let other = (node.sandboxes[index].pod + 1) % NAMES.len();
            types::PodSelector {
                namespace: "shop".to_owned(),
                name: NAMES[other].to_owned(),
                uid: uid(other, node.pods[other].generation),
            }
        };
        let request = Request::new(wire::AddPodRequest {
            sandbox: Some((&sandbox_ref(index)).into()),
            pod: Some(selector),
            netns: Some((&seen_netns(Path::new("/run/netns/of-another"), 1000 + index)).into()),
            addresses: vec![address(index)],
        });
        let answer = self.server.add_pod(request).await;
        let field = answer.err().map(|status| failure_of(&status).field);
        let after = self.registry.record(&sandbox_ref(index));
        if field.as_deref() != Some("sandbox.container_id") || after.as_ref() != Some(&before) {
            let what = format!("another pod was added with the container of c{index}: {field:?}");
            self.node.lock().violate(what);
        }
    }

    async fn check(&self, index: usize) {
        let before = oracle::disturbances(&self.node, index);
        let request = Request::new(wire::CheckPodRequest {
            sandbox: Some((&sandbox_ref(index)).into()),
        });
        let answer = self.server.check_pod(request).await;
        let is_undisturbed = oracle::disturbances(&self.node, index) == before;
        let ambient = types::Enrollment::Ambient;
        if is_undisturbed && answer.is_ok_and(|it| it.get_ref().enrollment() == ambient) {
            oracle::check_reported(&self.node, index);
        }
    }

    async fn collect(&self, listed: u32) {
        let attachment = |index: usize| wire::Attachment {
            container_id: sandbox_ref(index).container_id.to_string(),
            ifname: "eth0".to_owned(),
        };
        let valid: Vec<usize> = {
            let mut node = self.node.lock();
            let is_listed = |index: &usize| listed >> (index % 3) & 1 == 1;
            let valid: Vec<_> = (0..node.sandboxes.len()).filter(is_listed).collect();
            for (index, sandbox) in node.sandboxes.iter_mut().enumerate() {
                if !valid.contains(&index) {
                    sandbox.delete_requested = true;
                    sandbox.disturbances += 1;
                }
            }
            node.review_protection();
            valid
        };
        let request = Request::new(wire::CollectGarbageRequest {
            network_name: "net".to_owned(),
            valid_attachments: valid.into_iter().map(attachment).collect(),
        });
        self.server.collect_garbage(request).await.unwrap();
    }

    /// Replays an event that the plugin has written down, and repeats the replay until the event is settled.
    async fn replay(self: Arc<Self>, missed: Missed) {
        loop {
            let outcome = match &missed {
                Missed::Ended(index) => self.registry.replay_delete(&sandbox_ref(*index)).await,
                Missed::Admitted(index, add) => {
                    let pod = self.node.lock().sandboxes[*index].pod;
                    self.registry
                        .replay_add(&key(pod), OfflineAdd::clone(add))
                        .await
                }
            };
            self.registry
                .wake(&self.registry.keys().into_iter().collect());
            if !matches!(outcome, ReplayOutcome::Retry(_)) {
                return;
            }
            sleep(Duration::from_secs(5)).await;
        }
    }
}

/// Returns a netns with the facts that the plugin sees.
fn seen_netns(path: &Path, index: usize) -> NetnsRef {
    let id = netns_id(index);
    NetnsRef {
        device: Some(id.device),
        inode: Some(id.inode),
        ..NetnsRef::from_path(path)
    }
}

fn describe(
    answer: &Option<Result<tonic::Response<wire::AddPodResponse>, tonic::Status>>,
) -> String {
    match answer {
        None => "the caller left".to_owned(),
        Some(Ok(added)) => format!("{:?}", added.get_ref().enrollment()),
        Some(Err(status)) => status.message().to_owned(),
    }
}

struct Add {
    timeout: u64,
    leaves_after: Option<u64>,
    cleans_up: bool,
}

impl Driver<'_> {
    /// Runs pod-events until a crash or the end of the schedule. Returns whether pod-events has crashed.
    async fn live(&mut self, config: &Config) -> bool {
        set_since_boot(self.boot);
        {
            let mut node = self.node.lock();
            (node.dead, node.crash_in, node.crashed) = (false, None, Arc::default());
            node.netconfig.busy.clear();
            for sandbox in &mut node.sandboxes {
                // The process that would have answered is gone.
                sandbox.give_up_adds();
            }
            node.publish();
        }
        self.while_away().await;
        let run = Arc::new(Run::start(&self.node, self.directory, config).await);
        for missed in std::mem::take(&mut self.spool) {
            tokio::spawn(Arc::clone(&run).replay(missed));
        }
        let crashed = Arc::clone(&self.node.lock().crashed);
        let has_crashed = tokio::select! {
            biased;
            () = crashed.notified() => true,
            () = self.drive(&run) => false,
        };
        self.boot = since_boot() + RESTART_TIME;
        self.calls.clear();
        has_crashed
    }

    /// Performs the operations that pod-events misses: the plugin writes them down.
    async fn while_away(&mut self) {
        for _ in 0..std::mem::take(&mut self.missed) {
            let Some(op) = self.ops.next() else { return };
            self.node
                .lock()
                .note(|| format!("{op:?}  (while pod-events is away)"));
            // Nothing happens at the same time.
            sleep(Duration::from_millis(1)).await;
            match *op {
                Op::Wait { millis } => sleep(Duration::from_millis(millis)).await,
                Op::Delete { back } => {
                    let Some(index) = self.nth_newest(back) else {
                        continue;
                    };
                    let mut node = self.node.lock();
                    node.sandboxes[index].delete_requested = true;
                    node.review_protection();
                    self.spool.push(Missed::Ended(index));
                }
                Op::Stop { back, deletes } => {
                    let Some(index) = self.nth_newest(back) else {
                        continue;
                    };
                    self.spool.extend(deletes.then_some(Missed::Ended(index)));
                    self.unmount(index);
                }
                Op::Start {
                    pod,
                    labelled: false,
                    reuses_path,
                    ..
                } => {
                    self.show(pod, false);
                    let index = self.create(pod, reuses_path);
                    let admitted = self.offline_add(index);
                    self.spool.push(Missed::Admitted(index, Box::new(admitted)));
                    let mut node = self.node.lock();
                    let sandbox = &mut node.sandboxes[index];
                    (sandbox.admitted, sandbox.app) = (Some(true), true);
                    node.pods[pod].address_of = Some(index);
                    node.publish();
                }
                _ => self.change_node(op),
            }
        }
    }

    fn offline_add(&self, index: usize) -> OfflineAdd {
        let node = self.node.lock();
        let sandbox = &node.sandboxes[index];
        let call = AddCall::new(
            sandbox_ref(index),
            Some(uid(sandbox.pod, sandbox.generation).parse().unwrap()),
            seen_netns(&sandbox.path, index),
            vec![address(index).parse().unwrap()],
            Instant::now(),
            Trace::default(),
        );
        let at = BootInstant::now();
        OfflineAdd { call, at }
    }

    async fn drive(&mut self, run: &Arc<Run>) {
        while let Some(op) = self.ops.next() {
            self.node.lock().note(|| format!("{op:?}"));
            self.count(op, run);
            self.perform(*op, run).await;
            tokio::task::yield_now().await;
            oracle::check_moment(&self.node, &run.registry);
            if self.node.lock().violation.is_some() {
                return;
            }
        }
        self.settle(run).await;
    }

    /// Ends all faults, and lets time pass until every state is as desired.
    async fn settle(&mut self, run: &Arc<Run>) {
        let was_handed_over = {
            let mut node = self.node.lock();
            node.note(|| "the faults end".to_owned());
            node.faults.clear();
            (node.disk, node.crash_in, node.gap) = (Disk::Works, None, false);
            node.patching = Patching::Works;
            let is_handover = |leave: &mut UninstallMode| *leave == UninstallMode::Handover;
            let was_handed_over = node
                .leave
                .send_if_modified(|leave| leave.take_if(is_handover).is_some());
            node.broker.ztunnel = Ztunnel::Answers;
            node.broker.refused.clear();
            node.serve();
            let unmounted = node.sandboxes.iter_mut().filter(|it| !it.is_mounted);
            for sandbox in unmounted {
                sandbox.pause = false;
                sandbox.disturbances += 1;
            }
            for index in 0..node.sandboxes.len() {
                node.end_netns(index);
            }
            node.publish();
            was_handed_over
        };
        if was_handed_over {
            run.change_leave_mode();
        }
        let mut unrest = None;
        for seconds in REST {
            sleep(Duration::from_secs(seconds)).await;
            oracle::check_moment(&self.node, &run.registry);
            if self.node.lock().violation.is_some() {
                return;
            }
            unrest = oracle::find_unrest(&self.node, &run.registry);
            if unrest.is_none() {
                return;
            }
        }
        if let Some(unrest) = unrest {
            self.node.lock().violate(format!("at rest: {unrest}"));
        }
    }

    /// Returns the sandbox created `back` sandboxes before the newest.
    fn nth_newest(&self, back: usize) -> Option<usize> {
        let known = self.node.lock().sandboxes.len();
        known.checked_sub(1 + back)
    }

    async fn perform(&mut self, op: Op, run: &Arc<Run>) {
        match op {
            Op::Wait { millis } => sleep(Duration::from_millis(millis)).await,
            Op::Crash { steps, missed } => {
                self.missed = missed;
                self.node.lock().crash_in = Some(steps);
            }
            Op::Start {
                pod,
                labelled,
                previous_ends,
                reuses_path,
                timeout,
                leaves_after,
                cleans_up,
            } => {
                self.show(pod, labelled);
                let previous = self.node.lock().newest(pod);
                if let Some(previous) = previous.filter(|_| previous_ends) {
                    self.unmount(previous);
                }
                let index = self.create(pod, reuses_path);
                let call = Add {
                    timeout,
                    leaves_after,
                    cleans_up,
                };
                self.call(run, index, call);
            }
            Op::Repeat { back, timeout } => {
                let Some(index) = self.nth_newest(back) else {
                    return;
                };
                let is_current = {
                    let node = self.node.lock();
                    let sandbox = &node.sandboxes[index];
                    node.newest(sandbox.pod) == Some(index)
                        && sandbox.is_mounted
                        && sandbox.admitted.is_some()
                        && !sandbox.ran_before
                        // After a DEL a runtime starts another one.
                        && (sandbox.app || !sandbox.delete_requested)
                        && node.is_shown_alive(index)
                };
                if is_current {
                    let call = Add {
                        timeout,
                        leaves_after: None,
                        cleans_up: false,
                    };
                    self.call(run, index, call);
                }
            }
            Op::Confuse { back } => {
                if let Some(index) = self.nth_newest(back) {
                    run.confuse(index).await;
                }
            }
            Op::Delete { back } => {
                if let Some(index) = self.nth_newest(back) {
                    let run = Arc::clone(run);
                    tokio::spawn(async move { run.delete(index).await });
                }
            }
            Op::Stop { back, deletes } => {
                let Some(index) = self.nth_newest(back) else {
                    return;
                };
                {
                    let mut node = self.node.lock();
                    node.sandboxes[index].app = false;
                    node.review_protection();
                }
                let run = Arc::clone(run);
                tokio::spawn(async move {
                    if deletes {
                        run.delete(index).await;
                    }
                    run.unmount(index);
                });
            }
            Op::Collect { listed } => {
                let run = Arc::clone(run);
                tokio::spawn(async move { run.collect(listed).await });
            }
            Op::Check { back } => {
                if let Some(index) = self.nth_newest(back) {
                    let run = Arc::clone(run);
                    tokio::spawn(async move { run.check(index).await });
                }
            }
            Op::Twin { pod, timeout } => self.call_beside(run, pod, timeout),
            Op::Leave { .. } => {
                self.change_node(&op);
                run.change_leave_mode();
            }
            _ => self.change_node(&op),
        }
    }

    /// Calls ADD. A runtime has at most one unanswered ADD per pod and gives up the earlier call.
    fn call(&mut self, run: &Arc<Run>, index: usize, call: Add) {
        let mut node = self.node.lock();
        let pod = node.sandboxes[index].pod;
        if let Some((before, tasks)) = self.calls.remove(&pod) {
            for task in tasks {
                task.abort();
            }
            node.sandboxes[before].give_up_adds();
        }
        drop(node);
        let task = tokio::spawn(Arc::clone(run).add(index, call));
        self.calls.insert(pod, (index, vec![task]));
    }

    /// Calls ADD for a sandbox with an unanswered ADD.
    fn call_beside(&mut self, run: &Arc<Run>, pod: usize, timeout: u64) {
        let Some((index, tasks)) = self.calls.get_mut(&pod) else {
            return;
        };
        if self.node.lock().sandboxes[*index].unanswered_adds > 0 {
            let call = Add {
                timeout,
                leaves_after: None,
                cleans_up: false,
            };
            tasks.push(tokio::spawn(Arc::clone(run).add(*index, call)));
        }
    }

    fn show(&self, pod: usize, labelled: bool) {
        let mut node = self.node.lock();
        let object = &mut node.pods[pod];
        if !object.shown || object.terminal {
            // A runtime starts no sandbox for a pod that no longer exists.
            let generation = object.generation + 1;
            *object = Object {
                generation,
                ..Object::default()
            };
        }
        (object.shown, object.labelled) = (true, labelled);
        (object.terminating, object.terminal) = (false, false);
        node.publish();
    }

    fn create(&self, pod: usize, reuses_path: bool) -> usize {
        let mut node = self.node.lock();
        let index = node.sandboxes.len();
        let is_free = |path: &&PathBuf| {
            let mut mounted = node.sandboxes.iter().filter(|it| it.is_mounted);
            !mounted.any(|it| it.path == **path)
        };
        let mut known = node.sandboxes.iter().rev().map(|it| &it.path);
        let reused = known.find(is_free).filter(|_| reuses_path).cloned();
        let path = reused.unwrap_or_else(|| PathBuf::from(format!("/run/netns/n{index}")));
        let Object {
            generation,
            sidecar,
            ..
        } = node.pods[pod];
        node.sandboxes.push(Sandbox {
            pod,
            generation,
            sidecar,
            path,
            is_mounted: true,
            pause: true,
            app: false,
            rules: None,
            flows: 0,
            listeners_lost: false,
            acknowledged: false,
            ran_before: false,
            adds: 0,
            unanswered_adds: 0,
            admitted: None,
            delete_requested: false,
            end_confirmed: false,
            enrolled: false,
            protected_since: None,
            disturbances: 0,
        });
        node.review_protection();
        index
    }

    fn unmount(&self, index: usize) {
        let mut node = self.node.lock();
        let sandbox = &mut node.sandboxes[index];
        (sandbox.app, sandbox.pause, sandbox.is_mounted) = (false, false, false);
        sandbox.disturbances += 1;
        node.end_netns(index);
        node.review_protection();
    }

    /// Changes the parts of the node that pod-events only observes.
    fn change_node(&mut self, op: &Op) {
        let index = match *op {
            Op::Exit { back }
            | Op::Unmount { back }
            | Op::Flows { back, .. }
            | Op::Tear { back }
            | Op::LoseListeners { back } => {
                let Some(index) = self.nth_newest(back) else {
                    return;
                };
                index
            }
            _ => 0,
        };
        if let Op::RanBefore { pod, labelled } = *op {
            return self.run_before(pod, labelled);
        }
        let mut node = self.node.lock();
        let now = since_boot();
        let down = |millis: u32| now + Duration::from_millis(millis.into());
        match *op {
            Op::Label { pod, labelled } => node.pods[pod].labelled = labelled,
            Op::Terminate { pod } => node.pods[pod].terminating = node.pods[pod].shown,
            Op::Complete { pod } => node.pods[pod].terminal = node.pods[pod].shown,
            Op::Show { pod, shown } => {
                let object = &mut node.pods[pod];
                object.shown = shown && object.generation > 0;
                object.annotation.take_if(|_| !shown);
                object.condition.take_if(|_| !shown);
            }
            Op::Recreate { pod, labelled } => {
                let generation = node.pods[pod].generation + 1;
                node.pods[pod] = Object {
                    generation,
                    shown: true,
                    labelled,
                    ..Object::default()
                };
            }
            Op::Inject { pod } => {
                let generation = node.pods[pod].generation + 1;
                node.pods[pod] = Object {
                    generation,
                    shown: true,
                    sidecar: true,
                    ..Object::default()
                };
            }
            Op::Patching { patching } => node.patching = patching,
            Op::Leave { mode } => {
                node.leave.send_replace(mode);
            }
            Op::Gap { gap } => node.gap = gap,
            Op::Exit { .. } => {
                node.sandboxes[index].app = false;
                node.end_netns(index);
            }
            Op::Unmount { .. } => {
                let sandbox = &mut node.sandboxes[index];
                (sandbox.app, sandbox.is_mounted) = (false, false);
                sandbox.disturbances += 1;
                node.end_netns(index);
            }
            Op::Flows { flows, .. } => {
                let sandbox = &mut node.sandboxes[index];
                sandbox.flows = if sandbox.rules.is_some() { flows } else { 0 };
            }
            Op::Tear { .. } => {
                let sandbox = &mut node.sandboxes[index];
                sandbox.disturbances += 1;
                sandbox.rules = sandbox.rules.map(|_| Rules::Torn);
                node.send_state(index);
            }
            Op::LoseListeners { .. } => {
                node.sandboxes[index].listeners_lost = true;
                node.sandboxes[index].disturbances += 1;
            }
            Op::Ztunnel { mode } => {
                node.broker.ztunnel = mode;
                node.broker.refused.clear();
                node.serve();
            }
            Op::RestartZtunnel => {
                node.broker.serving.clear();
                node.disturb();
                node.serve();
            }
            Op::RestartNetconfig { down: time } => {
                let netconfig = &mut node.netconfig;
                netconfig.up_at = down(time);
                netconfig.instance.send_modify(|instance| *instance += 1);
                netconfig.claims.clear();
                netconfig.watchers.clear();
                netconfig.busy.clear();
                node.disturb();
            }
            Op::RestartBroker { down: time } => {
                let broker = &mut node.broker;
                broker.up_at = down(time);
                broker.instance.send_modify(|instance| *instance += 1);
                broker.seeded = false;
                broker.entries.clear();
                broker.tombstones.clear();
                broker.refused.clear();
                broker.watchers.clear();
                node.disturb();
            }
            Op::Fault { method, fault } => node.faults.push((method, fault)),
            Op::Disk { disk } => node.disk = disk,
            _ => {}
        }
        node.publish();
    }

    fn run_before(&self, pod: usize, labelled: bool) {
        self.show(pod, labelled);
        let index = self.create(pod, false);
        let mut node = self.node.lock();
        let sandbox = &mut node.sandboxes[index];
        (sandbox.app, sandbox.admitted) = (true, Some(true));
        sandbox.ran_before = true;
        node.pods[pod].address_of = Some(index);
        node.publish();
    }

    /// Counts which states of records an operation meets.
    fn count(&mut self, op: &Op, run: &Run) {
        let Some((event, scope)) = event_of(op) else {
            return;
        };
        let states: Vec<_> = match scope {
            Scope::Sandbox(back) => {
                let index = self.nth_newest(back);
                index.map(|index| run.state(index)).into_iter().collect()
            }
            Scope::Pod(pod) => {
                let view = run.registry.view(&key(pod)).unwrap_or_default();
                let records = view.records.iter();
                let mut states: Vec<_> = records
                    .map(|record| oracle::state_of(&record.intent))
                    .collect();
                if states.is_empty() {
                    states.push("none");
                }
                states
            }
            Scope::Node => {
                let records = run.registry.records();
                let known = records
                    .iter()
                    .filter(|it| index_of(&it.sandbox.container_id).is_some());
                known
                    .map(|record| oracle::state_of(&record.intent))
                    .collect()
            }
        };
        for state in states {
            *self.reached.pairs.entry((state, event)).or_default() += 1;
        }
    }
}

enum Scope {
    Sandbox(usize),
    Pod(usize),
    Node,
}

fn event_of(op: &Op) -> Option<(&'static str, Scope)> {
    Some(match *op {
        Op::ApiServer | Op::RanBefore { .. } | Op::Wait { .. } | Op::Check { .. } => return None,
        Op::Confuse { back } => ("another pod's ADD", Scope::Sandbox(back)),
        Op::Patching { .. } => ("annotations' patches", Scope::Node),
        Op::Leave { mode } => match mode {
            Some(UninstallMode::Uninstall) => ("uninstall", Scope::Node),
            Some(UninstallMode::Handover) => ("handover", Scope::Node),
            None => ("removal ended", Scope::Node),
        },
        Op::Inject { pod } => ("sidecar injected", Scope::Pod(pod)),
        Op::Start { pod, .. } => ("ADD of the next", Scope::Pod(pod)),
        Op::Repeat { back, .. } => ("ADD again", Scope::Sandbox(back)),
        Op::Twin { pod, .. } => ("ADD beside", Scope::Pod(pod)),
        Op::Delete { back } => ("DEL", Scope::Sandbox(back)),
        Op::Collect { .. } => ("GC", Scope::Node),
        Op::Label {
            pod,
            labelled: true,
        } => ("labelled", Scope::Pod(pod)),
        Op::Label {
            pod,
            labelled: false,
        } => ("unlabelled", Scope::Pod(pod)),
        Op::Terminate { pod } => ("pod terminating", Scope::Pod(pod)),
        Op::Complete { pod } => ("pod terminal", Scope::Pod(pod)),
        Op::Show { pod, shown: false } => ("pod gone", Scope::Pod(pod)),
        Op::Show { pod, shown: true } => ("pod shown", Scope::Pod(pod)),
        Op::Recreate { pod, .. } => ("pod recreated", Scope::Pod(pod)),
        Op::Gap { gap: true } => ("source incomplete", Scope::Node),
        Op::Gap { gap: false } => ("source complete", Scope::Node),
        Op::Exit { back } => ("processes end", Scope::Sandbox(back)),
        Op::Unmount { back } => ("path gone", Scope::Sandbox(back)),
        Op::Stop { back, .. } => ("sandbox stopped", Scope::Sandbox(back)),
        Op::Flows { back, .. } => ("connections", Scope::Sandbox(back)),
        Op::Tear { back } => ("rules torn", Scope::Sandbox(back)),
        Op::LoseListeners { back } => ("listeners lost", Scope::Sandbox(back)),
        Op::Ztunnel { .. } => ("ztunnel's answers", Scope::Node),
        Op::RestartZtunnel => ("ztunnel restarts", Scope::Node),
        Op::RestartNetconfig { .. } => ("netconfig restarts", Scope::Node),
        Op::RestartBroker { .. } => ("broker restarts", Scope::Node),
        Op::Fault { .. } => ("fault", Scope::Node),
        Op::Disk { .. } => ("disk changes", Scope::Node),
        Op::Crash { .. } => ("crash", Scope::Node),
    })
}
