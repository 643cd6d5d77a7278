//! The broker is killed at named points with 200 workloads. Each time it recovers all, ztunnels notice no more than a
//! closed socket, and connections continue.
//!
//! A point is where something is withheld: a call or a descriptor from the broker, or a scripted ztunnel's
//! acknowledgement. A reference ztunnel carries the connections throughout.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    os::unix::{fs::symlink, net::UnixListener},
    path::PathBuf,
};

use crate::common::flows::Flow;
use crate::common::scripted::{Hold, Scripted, Served};
use anyhow::{Context as _, ensure};
use inpod_proto::ztunnelbroker::v1::{SessionPhase, WorkloadPhase, WorkloadStatus};
use integration::{App, Call, Held, Moment, Node, Pod, Proxy, Spec, Step, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::Value;

const BROKER: &str = "ztunnel-broker";
const WORKLOADS: usize = 200;
const PORT: u16 = 8080;

/// CNI's error code "try again later".
const TRY_LATER: &str = "\"code\":11";

/// Brings the broker to a point, kills it, and waits for recovery.
type Act = dyn Fn(&Bench) -> anyhow::Result<()>;

/// A node whose processes connect through the proxy. The broker's own run directory lets
/// netconfig's descriptors be replaced.
struct Bench {
    flows: Vec<Flow>,
    expected: Served,
    pods: Vec<Pod>,
    _app: App,
    scripted: Scripted,
    /// Descriptors of the reference ztunnel and the broker before the first kill.
    descriptors: (usize, usize),
    proxy: Proxy,
    behind: PathBuf,
    apart: PathBuf,
    node: Node,
}

impl Bench {
    fn new() -> anyhow::Result<Self> {
        let node = Node::new()?;
        let [behind, apart] = ["behind", "apart"].map(|name| node.run_dir().with_file_name(name));
        fs::create_dir(&behind)?;
        fs::create_dir(&apart)?;
        symlink(apart.join(BROKER), behind.join(BROKER))?;
        symlink(behind.join("netns"), apart.join("netns"))?;
        let proxy = Proxy::start(&node.run_dir(), &behind)?;
        node.start_at(&behind, "netconfig", &["--peer", "uid"])?;
        node.start_at(&apart, BROKER, &["--peer", "uid"])?;
        node.start("pod-events")?;
        node.start_ztunnel(&[])?;
        node.ready()?;
        let spec = |index| Spec::new(&format!("web-{index}")).ambient();
        let pods = node.pods((0..WORKLOADS).map(spec).collect())?;
        let outsider = node.sandbox(Spec::new("outsider"))?;
        let identity = |pod: &Pod| {
            let id = pod.netns.id();
            (pod.spec.uid.clone(), (id.device, id.inode))
        };
        let to = SocketAddr::new(outsider.v4.into(), PORT);
        let app = App::start(&outsider.netns, PORT)?;
        let flows = pods.iter().step_by(40).map(|pod| Flow::open(pod, to));
        let mut bench = Self {
            flows: flows.collect::<Result<_, _>>()?,
            expected: pods.iter().map(identity).collect(),
            pods,
            _app: app,
            scripted: Scripted::start(&node.zds_socket())?,
            descriptors: (0, 0),
            proxy,
            behind,
            apart,
            node,
        };
        eventually("all are served", 2 * TIMEOUT, || bench.agrees())?;
        bench.descriptors = bench.open_descriptors()?;
        Ok(bench)
    }

    fn kill(&self) -> anyhow::Result<()> {
        self.node.stop(BROKER, Signal::SIGKILL)
    }

    fn start(&self) -> anyhow::Result<()> {
        self.node.start_at(&self.apart, BROKER, &["--peer", "uid"])
    }

    /// Kills the broker and waits until everything is as before.
    fn recovers(&self) -> anyhow::Result<()> {
        self.kill()?;
        self.start()?;
        self.is_whole()
    }

    fn is_whole(&self) -> anyhow::Result<()> {
        eventually("all are served again", 2 * TIMEOUT, || {
            self.agrees()?;
            let now = self.open_descriptors()?;
            ensure!(
                now == self.descriptors,
                "{now:?}, not {:?}",
                self.descriptors
            );
            anyhow::Ok(())
        })?;
        self.flows.iter().try_for_each(Flow::goes_on)
    }

    /// Expects the broker and both ztunnels to hold exactly the pods and their netns.
    fn agrees(&self) -> anyhow::Result<()> {
        let reported = self.node.api().workloads()?;
        let live = |phase| phase == SessionPhase::Live;
        let sessions = reported
            .sessions
            .iter()
            .filter(|it| live(it.phase()))
            .count();
        let served = reported.workloads.iter().filter(|it| is_served(it)).count();
        let counts = (reported.seeded, reported.workloads.len(), served, sessions);
        ensure!(counts == (true, WORKLOADS, WORKLOADS, 2), "{counts:?}");
        let account = self.scripted.served()?;
        ensure!(account == self.expected, "scripted: {}", account.len());
        let reference = self.reference()?;
        ensure!(reference == self.expected, "reference: {}", reference.len());
        Ok(())
    }

    fn starts(&self) -> Vec<(&str, usize)> {
        let log = self.node.tail("ztunnel", usize::MAX);
        let starts: Vec<_> = log
            .lines()
            .filter(|it| it.contains("pod started"))
            .collect();
        let of = |uid: &str| starts.iter().filter(|it| it.contains(uid)).count();
        let uids = self.pods.iter().map(|pod| pod.spec.uid.as_str());
        uids.map(|uid| (uid, of(uid))).collect()
    }

    fn reference(&self) -> anyhow::Result<Served> {
        let state = self.node.ztunnel_state()?;
        ensure!(state.get("ready") == Some(&Value::Bool(true)), "not ready");
        let pods = state.get("pods").and_then(Value::as_array);
        let number = |pod: &Value, path| pod.pointer(path).and_then(Value::as_u64);
        let identity = |pod: &Value| {
            let uid = pod.get("uid")?.as_str()?.to_owned();
            Some((
                uid,
                (number(pod, "/netns/dev")?, number(pod, "/netns/ino")?),
            ))
        };
        let pods = pods.context("no pods")?.iter().map(identity);
        pods.collect::<Option<_>>().context("another form")
    }

    /// Counts descriptors of the reference ztunnel and the broker; each workload accounts for one.
    fn open_descriptors(&self) -> anyhow::Result<(usize, usize)> {
        let of = |process| -> anyhow::Result<Vec<PathBuf>> {
            let pid = self.node.pid(process)?;
            let links = fs::read_dir(format!("/proc/{pid}/fd"))?;
            let links = links.map(|it| Ok(fs::read_link(it?.path()).unwrap_or_default()));
            links.collect()
        };
        let broker = of(BROKER)?;
        let is_netns = |link: &&PathBuf| {
            let link = link.display().to_string();
            link.starts_with("net:") || link.starts_with("/run/netns/")
        };
        let netns = broker.iter().filter(is_netns).count();
        ensure!(netns == WORKLOADS, "the broker holds {netns} netns");
        Ok((of("ztunnel")?.len(), broker.len()))
    }

    fn start_unseeded(&self) -> anyhow::Result<Held> {
        self.kill()?;
        let held = self.proxy.hold(Step {
            method: "SetWorkloads",
            moment: Moment::Before,
        });
        self.start()?;
        held.reached()?;
        Ok(held)
    }

    /// Replaces netconfig's directory of descriptors.
    fn start_with_descriptors_at(&self, directory: &str) -> anyhow::Result<()> {
        self.kill()?;
        self.link_descriptors(&self.apart.join(directory))?;
        self.start()
    }

    fn link_descriptors(&self, to: &std::path::Path) -> anyhow::Result<()> {
        fs::remove_file(self.apart.join("netns"))?;
        Ok(symlink(to, self.apart.join("netns"))?)
    }

    fn holding(&self) -> anyhow::Result<(bool, usize, usize)> {
        let reported = self.node.api().workloads()?;
        let held = reported.workloads.iter().filter(|it| it.descriptor_held);
        Ok((reported.seeded, reported.workloads.len(), held.count()))
    }

    /// Makes the scripted ztunnel receive a new snapshot up to a point.
    fn snapshot_until(&self, hold: Hold) -> anyhow::Result<()> {
        self.scripted.hold(hold);
        self.scripted.reconnect();
        self.scripted.until_held()
    }

    fn add_enrolled_pod(&self, name: &str) -> anyhow::Result<Pod> {
        let pod = self.node.sandbox(Spec::new(name).ambient())?;
        self.node.until_known(&pod.spec)?;
        self.node.add(&pod)?;
        eventually("the scripted ztunnel has it", TIMEOUT, || {
            let account = self.scripted.served()?;
            ensure!(account.contains_key(&pod.spec.uid), "not yet");
            anyhow::Ok(())
        })?;
        Ok(pod)
    }

    /// Kills the broker during a CNI call, which succeeds, or is answered "try again later" and succeeds when
    /// repeated, depending on whether the other ztunnel had answered.
    fn kill_during_call(
        &self,
        call: Call,
        reached: impl FnOnce() -> anyhow::Result<Option<Held>>,
    ) -> anyhow::Result<()> {
        let call = call.timeout_seconds(20);
        let running = call.start()?;
        let held = reached()?;
        self.kill()?;
        if let Some(held) = held {
            held.release();
        }
        self.start()?;
        let mut outcome = running.wait()?;
        if outcome.stdout.contains(TRY_LATER) {
            self.node.ready()?;
            outcome = call.start()?.wait()?;
        }
        ensure!(outcome.code == 0, "{outcome:?}");
        Ok(())
    }

    /// Kills the broker while it sends a removal.
    fn kill_during_removal(
        &self,
        pod: &Pod,
        reached: impl FnOnce() -> anyhow::Result<Option<Held>>,
    ) -> anyhow::Result<()> {
        self.kill_during_call(self.node.call(Call::del, pod), reached)?;
        pod.unmount()?;
        self.is_whole()
    }
}

fn is_served(status: &WorkloadStatus) -> bool {
    let added = |phase| phase == WorkloadPhase::Added;
    let states = status.states.iter().filter(|it| added(it.phase()));
    status.descriptor_held && states.count() == 2
}

fn before_it_is_seeded(bench: &Bench) -> anyhow::Result<()> {
    let held = bench.start_unseeded()?;
    ensure!(bench.holding()? == (false, 0, 0), "it is seeded");
    bench.kill()?;
    held.release();
    bench.start()?;
    bench.is_whole()
}

fn seeded_without_descriptors(bench: &Bench) -> anyhow::Result<()> {
    bench.start_with_descriptors_at("nowhere")?;
    eventually("it is seeded", TIMEOUT, || {
        let holding = bench.holding()?;
        ensure!(holding == (true, WORKLOADS, 0), "{holding:?}");
        anyhow::Ok(())
    })?;
    bench.link_descriptors(&bench.behind.join("netns"))?;
    bench.recovers()
}

fn while_it_fetches_descriptors(bench: &Bench) -> anyhow::Result<()> {
    let deaf = bench.apart.join("deaf");
    fs::create_dir(&deaf)?;
    let listener = UnixListener::bind(deaf.join("netns.sock"))?;
    bench.start_with_descriptors_at("deaf")?;
    listener.set_nonblocking(true)?;
    let (mut asked, _) = eventually("the broker asks", TIMEOUT, || listener.accept())?;
    asked.set_nonblocking(false)?;
    asked.set_read_timeout(Some(TIMEOUT))?;
    asked.read_exact(&mut [0; 4])?;
    bench.link_descriptors(&bench.behind.join("netns"))?;
    bench.recovers()
}

fn hello_received_and_nothing_sent(bench: &Bench) -> anyhow::Result<()> {
    let held = bench.start_unseeded()?;
    let own = i32::try_from(std::process::id())?;
    eventually("the hello is there", TIMEOUT, || {
        let sessions = bench.node.api().workloads()?.sessions;
        let mine = sessions.iter().find(|it| it.peer_pid == own);
        let mine = mine.context("no session")?;
        ensure!(mine.phase() == SessionPhase::Snapshot, "{mine:?}");
        ensure!(mine.acknowledged == 0, "{mine:?}");
        anyhow::Ok(())
    })?;
    bench.kill()?;
    held.release();
    bench.start()?;
    bench.is_whole()
}

fn live_with_an_add_in_flight(bench: &Bench) -> anyhow::Result<()> {
    let pod = bench.node.sandbox(Spec::new("one-more").ambient())?;
    bench.node.until_known(&pod.spec)?;
    bench.scripted.hold(Hold::AddOf(pod.spec.uid.clone()));
    let call = bench.node.call(Call::add, &pod);
    bench.kill_during_call(call, || bench.scripted.until_held().map(|()| None))?;
    bench.node.until_whole(&pod.spec)?;
    bench.node.del(&pod)?;
    bench.is_whole()
}

fn live_with_a_del_in_flight(bench: &Bench) -> anyhow::Result<()> {
    let pod = bench.add_enrolled_pod("leaves")?;
    bench.scripted.hold(Hold::DelOf(pod.spec.uid.clone()));
    bench.kill_during_removal(&pod, || bench.scripted.until_held().map(|()| None))
}

fn during_remove_workload(bench: &Bench) -> anyhow::Result<()> {
    let pod = bench.add_enrolled_pod("removed")?;
    let held = bench.proxy.hold(Step {
        method: "RemoveWorkload",
        moment: Moment::Before,
    });
    bench.kill_during_removal(&pod, || held.reached().map(|()| Some(held)))
}

fn in_the_snapshot(hold: Hold) -> impl Fn(&Bench) -> anyhow::Result<()> {
    move |bench| {
        bench.snapshot_until(hold.clone())?;
        bench.recovers()
    }
}

#[test]
fn killed_at_any_of_its_points_the_broker_holds_all_two_hundred_again_and_no_connection_breaks() {
    let bench = Bench::new().unwrap();
    let points: [(&str, &Act); 11] = [
        ("before it is seeded", &before_it_is_seeded),
        ("seeded without descriptors", &seeded_without_descriptors),
        (
            "while it fetches descriptors",
            &while_it_fetches_descriptors,
        ),
        (
            "hello received, nothing sent",
            &hello_received_and_nothing_sent,
        ),
        (
            "mid-snapshot, an Add in flight",
            &in_the_snapshot(Hold::Add(WORKLOADS / 2)),
        ),
        (
            "the last Add in flight",
            &in_the_snapshot(Hold::Add(WORKLOADS)),
        ),
        (
            "SnapshotSent in flight",
            &in_the_snapshot(Hold::SnapshotSent),
        ),
        ("live and idle", &Bench::recovers),
        ("live, an Add in flight", &live_with_an_add_in_flight),
        ("live, a Del in flight", &live_with_a_del_in_flight),
        ("during RemoveWorkload", &during_remove_workload),
    ];
    for (name, point) in points {
        point(&bench).with_context(|| name).unwrap();
        let starts = bench.starts();
        assert!(
            starts.iter().all(|(_, times)| *times == 1),
            "{name}: {starts:?}"
        );
    }
}
