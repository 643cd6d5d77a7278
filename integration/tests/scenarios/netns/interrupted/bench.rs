//! A node behind a proxy that holds a call at a step.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use inpod_proto::podevents::v1::PodState;
use integration::{
    Call, Held, Moment, Node, Outcome, Pod, Proxy, Running, SERVICES, Spec, Step, TIMEOUT,
    eventually,
};
use nix::sys::signal::Signal;

const ADD: [&str; 4] = ["AddPod", "ClaimNetns", "AddWorkload", "ApplyRules"];

/// The last two calls of a DEL are concurrent.
const DEL: [&str; 3] = ["DeletePod", "RemoveWorkload", "ReleaseNetns"];

/// With a sidecar, only netconfig is involved.
const ADD_SIDECAR: [&str; 3] = ["AddPod", "ClaimNetns", "ApplyRules"];
const DEL_SIDECAR: [&str; 2] = ["DeletePod", "ReleaseNetns"];

/// Seconds, for a plugin whose deadline is to pass.
const SHORT: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    PluginKilled,
    DeadlinePassed,
    Killed(&'static str),
}

/// The proxy that receives a pod's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Ztunnel,
    Sidecar,
}

/// A pod's complete state, on which every component must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinalState {
    /// Captured, served, and recorded as such.
    In,
    /// No trace of it is left.
    Out,
    /// The sandbox has ended: no service holds anything, and its rules end with its netns.
    Ended,
}

pub(crate) struct Bench {
    pub(crate) proxy: Proxy,
    behind: PathBuf,
    pub(crate) node: Node,
    to: To,
}

impl Bench {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Self::of(To::Ztunnel)
    }

    pub(crate) fn of(to: To) -> anyhow::Result<Self> {
        let node = Node::new()?;
        let behind = node.run_dir().with_file_name("behind");
        let bench = Self {
            proxy: Proxy::start(&node.run_dir(), &behind)?,
            behind,
            node,
            to,
        };
        SERVICES
            .iter()
            .try_for_each(|service| bench.start(service))?;
        bench.start("ztunnel")?;
        bench.node.ready()?;
        Ok(bench)
    }

    pub(crate) fn start(&self, process: &str) -> anyhow::Result<()> {
        match process {
            "ztunnel" => self.node.start_ztunnel(&[]),
            "pod-events" => self.node.start(process),
            _ => self
                .node
                .start_at(&self.behind, process, &["--peer", "uid"]),
        }
    }

    /// Returns a new sandbox for the event.
    pub(crate) fn sandbox(&self) -> anyhow::Result<Pod> {
        self.node.sandbox(match self.to {
            To::Ztunnel => Spec::new("a").ambient(),
            To::Sidecar => Spec::new("a").injected(),
        })
    }

    pub(crate) fn call(
        &self,
        verb: fn(&Pod, &std::path::Path, &std::path::Path) -> Call,
        pod: &Pod,
    ) -> Call {
        let socket = inpod_service::socket(&self.behind, "pod-events");
        verb(pod, &socket, &self.node.state_dir())
    }

    /// Holds a call at a step, lets the event happen, and returns the outcome.
    fn interrupt(&self, call: &Call, step: Step, event: Event) -> anyhow::Result<Outcome> {
        let held = self.proxy.hold(step);
        let running = call.start()?;
        held.reached()?;
        match event {
            Event::PluginKilled => {
                let outcome = running.kill();
                held.release();
                outcome
            }
            Event::DeadlinePassed => expect_timeout(running, held),
            Event::Killed(process) => {
                self.node.stop(process, Signal::SIGKILL)?;
                held.release();
                self.start(process)?;
                running.wait()
            }
        }
    }

    /// Waits until all components agree, lastingly, on one of these states.
    pub(crate) fn until_final(
        &self,
        pod: &Pod,
        states: &[FinalState],
    ) -> anyhow::Result<FinalState> {
        let mut since: Option<(FinalState, Instant)> = None;
        let firm = Duration::from_millis(200);
        eventually("the pod is wholly in or wholly out", 2 * TIMEOUT, || {
            let found = self.look(pod).inspect_err(|_| since = None)?;
            if !states.contains(&found) {
                since = None;
                bail!("it is {found:?}");
            }
            let (known, when) = *since.get_or_insert_with(|| (found, Instant::now()));
            if known != found {
                since = None;
            }
            ensure!(known == found && when.elapsed() > firm, "not for long yet");
            anyhow::Ok(found)
        })
    }

    fn look(&self, pod: &Pod) -> anyhow::Result<FinalState> {
        let known = self.node.explain(&pod.spec)?;
        let claimed = self
            .node
            .api()
            .claims()?
            .iter()
            .any(|claim| claim.path == pod.path().display().to_string());
        let served = self.node.api().workloads()?.workloads.iter().any(|status| {
            let workload = status.workload.as_ref();
            workload.is_some_and(|workload| workload.uid == pod.spec.uid)
        });
        let listed = self
            .node
            .ztunnel_state()?
            .to_string()
            .contains(&pod.spec.uid);
        let recorded = known.sandbox.is_some() || !self.checkpoint()?.is_empty();
        let traces = pod.traces()?;
        let rules = known.rules.clone().unwrap_or_default();
        let redirected = known.rules.is_some() && rules.differences.is_empty();
        let listens = [15001, 15006, 15008]
            .iter()
            .all(|port| rules.listening_ports.contains(port));
        let acknowledged = known.ztunnels.iter().any(|report| report.state == "added");
        let by_ztunnel = match self.to {
            To::Ztunnel => [served, listed, listens, acknowledged],
            // The proxy does all of this.
            To::Sidecar => [!served, !listed, !listens, known.ztunnels.is_empty()],
        };
        let inside = [
            known.state() == PodState::Enrolled,
            claimed,
            recorded,
            !traces.is_empty(),
            redirected,
        ];
        let inside: Vec<_> = inside.into_iter().chain(by_ztunnel).collect();
        let outside = [
            known.state() == PodState::Out,
            !claimed,
            !served,
            !listed,
            !recorded,
        ]
        .iter()
        .all(|holds| *holds);
        match (inside.iter().all(|holds| *holds), outside) {
            (true, false) => Ok(FinalState::In),
            (false, true) if traces.is_empty() => Ok(FinalState::Out),
            (false, true) => Ok(FinalState::Ended),
            _ => bail!("neither: {inside:?}, {traces:?}, {known:?}"),
        }
    }

    pub(crate) fn checkpoint(&self) -> anyhow::Result<Vec<PathBuf>> {
        let files = fs::read_dir(self.node.run_dir().join("pod-events/pods"))?;
        files.map(|file| Ok(file?.path())).collect()
    }

    /// Repeats like a runtime after "try again later".
    pub(crate) fn repeat(&self, call: &Call) -> anyhow::Result<()> {
        self.node.ready()?;
        let outcome = call.run()?;
        ensure!(outcome.code == 0, "the same call again: {outcome:?}");
        Ok(())
    }

    fn ends(&self, pod: &Pod, call: &Call) -> anyhow::Result<()> {
        self.repeat(call)?;
        self.until_final(pod, &[FinalState::Out, FinalState::Ended])?;
        pod.unmount()
    }

    fn add(&self, step: Step, event: Event) -> anyhow::Result<()> {
        let pod = self.sandbox()?;
        let call = self.call(Call::add, &pod);
        let outcome = self.interrupt(&limited(&call, event), step, event)?;
        let until_final = self.until_final(&pod, &[FinalState::In, FinalState::Out])?;
        expected(&outcome, event)?;
        ensure!(
            outcome.code != 0 || until_final == FinalState::In,
            "the runtime was told that the pod is in"
        );
        self.repeat(&call)?;
        self.until_final(&pod, &[FinalState::In])?;
        self.ends(&pod, &self.call(Call::del, &pod))
    }

    fn del(&self, step: Step, event: Event) -> anyhow::Result<()> {
        let pod = self.sandbox()?;
        let added = self.call(Call::add, &pod).run()?;
        ensure!(added.code == 0, "{added:?}");
        let call = self.call(Call::del, &pod);
        let outcome = self.interrupt(&limited(&call, event), step, event)?;
        if event == Event::PluginKilled {
            self.until_final(&pod, &[FinalState::In, FinalState::Ended])?;
        } else {
            ensure!(
                outcome.code == 0 && outcome.stdout.is_empty(),
                "a DEL failed: {outcome:?}"
            );
            // The agent reads what it missed in the spool.
            self.until_final(&pod, &[FinalState::Ended])?;
        }
        self.ends(&pod, &call)
    }

    /// Acts at each step of an ADD and of a DEL, before and after it.
    pub(crate) fn at_each_step(&self, event: Event) -> anyhow::Result<()> {
        let both = |method: &&'static str| {
            [Moment::Before, Moment::After].map(|moment| Step { method, moment })
        };
        let (adds, dels) = match self.to {
            To::Ztunnel => (&ADD[..], &DEL[..]),
            To::Sidecar => (&ADD_SIDECAR[..], &DEL_SIDECAR[..]),
        };
        for step in adds.iter().flat_map(both) {
            let done = self.add(step, event);
            done.with_context(|| format!("ADD, {event:?} at {step:?}"))?;
        }
        for step in dels.iter().flat_map(both) {
            let done = self.del(step, event);
            done.with_context(|| format!("DEL, {event:?} at {step:?}"))?;
        }
        // What was spooled meanwhile is eventually replayed.
        let spool = self.node.state_dir().join("spool");
        eventually("the spool is read", TIMEOUT, || {
            let left = fs::read_dir(&spool).map_or(0, Iterator::count);
            ensure!(left == 0, "{left} entries are left");
            anyhow::Ok(())
        })
    }
}

fn limited(call: &Call, event: Event) -> Call {
    match event {
        Event::DeadlinePassed => call.clone().timeout_seconds(SHORT),
        Event::PluginKilled | Event::Killed(_) => call.clone().timeout_seconds(15),
    }
}

/// The plugin gives up although the call is still held.
fn expect_timeout(running: Running, held: Held) -> anyhow::Result<Outcome> {
    let outcome = running.wait()?;
    held.release();
    Ok(outcome)
}

/// Allows success and "try again later".
fn expected(outcome: &Outcome, event: Event) -> anyhow::Result<()> {
    match (event, outcome.code) {
        (Event::PluginKilled, code) => ensure!(code == -1, "not killed: {outcome:?}"),
        (Event::DeadlinePassed, 0) => bail!("in time: {outcome:?}"),
        (_, 0) => {}
        _ => {
            let (code, words) = outcome.refusal()?;
            ensure!(code == 11, "{code}: {words}");
        }
    }
    Ok(())
}
