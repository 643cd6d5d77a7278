//! The end: everything runs again, and each pod is checked.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::SERVICES;
use serde_json::Value;

use crate::kube::alone::chaos::{
    SETTLE_TIMEOUT,
    oracle::Way,
    run::Chaos,
    subject::{Subject, wanted},
};

const NOTHING: [String; 0] = [];

impl Chaos {
    /// Restarts everything, repeats failed calls, and waits until all is as it is wanted.
    pub(crate) fn settle(&mut self) -> anyhow::Result<()> {
        self.note("everything comes back".to_owned());
        self.restart_due(Instant::now() + SETTLE_TIMEOUT)?;
        self.pass_until("the API server is back", |it| it.restarting.is_none())?;
        if self.ztunnels.is_empty() {
            self.start_ztunnel()?;
        }
        let names: Vec<_> = self.subjects.keys().cloned().collect();
        self.pass_until("calls are answered", |it| {
            it.threads.is_empty() && it.subjects.values().all(|it| it.adding.is_none())
        })?;
        self.cluster.until_served();
        for name in names {
            while self
                .subjects
                .get(&name)
                .is_some_and(|it| it.alive.is_none())
            {
                self.add(&name, Duration::ZERO);
                self.pass_until("an ADD is answered", |it| {
                    it.subjects.values().all(|it| it.adding.is_none())
                })?;
            }
        }
        let began = Instant::now();
        loop {
            self.pass(Duration::from_millis(200))?;
            let mut subjects = self.subjects.iter();
            let checked = subjects.try_for_each(|(name, it)| self.is_as_wanted(name, it));
            let checked = checked.and_then(|()| self.is_nothing_leaked());
            if checked.is_ok() || began.elapsed() > SETTLE_TIMEOUT || self.is_over() {
                self.note(format!("settled after {:?}", began.elapsed()));
                // What was seen until now is judged.
                self.pass(Duration::from_secs(2))?;
                return checked;
            }
        }
    }

    pub(crate) fn print_totals(&self) {
        let total = |column| format!("{column} {}", self.figures.total(column));
        let totals = ["captured", "direct", "failed", "lost", "violations"].map(total);
        let (escaped, latest) = self.escaped;
        println!(
            "connections: {}; direct while rules were torn: {escaped}, the latest {latest:?} after a repair could begin",
            totals.join(", ")
        );
    }

    /// Keeps the processes' logs beside the figures.
    pub(crate) fn keep_logs(&self, directory: &Path) -> anyhow::Result<()> {
        let numbers = 1..=self.ztunnels_started;
        let ztunnels = numbers.map(|number| format!("ztunnel-{number}"));
        for process in SERVICES.map(str::to_owned).into_iter().chain(ztunnels) {
            let log = self.cluster.node.tail(&process, usize::MAX);
            fs::write(directory.join(format!("chaos-{process}.log")), log)?;
        }
        Ok(())
    }

    fn is_wanted(&self, subject: &Subject) -> bool {
        wanted(subject.mode, self.is_namespace_in).0 == Way::Captured
    }

    fn is_as_wanted(&self, name: &str, subject: &Subject) -> anyhow::Result<()> {
        let known = self.cluster.node.explain(&subject.pod.spec)?;
        let wanted = self.is_wanted(subject);
        let state = if wanted {
            PodState::Enrolled
        } else {
            PodState::Out
        };
        ensure!(
            known.state() == state,
            "{name} is wanted {state:?}: {known:?}"
        );
        ensure!(
            known.last_failure.is_none(),
            "{name}: {:?}",
            known.last_failure
        );
        if wanted {
            let rules = known.rules.as_ref().context("no rules are known")?;
            ensure!(
                rules.differences.is_empty(),
                "{name}: {:?}",
                rules.differences
            );
            for port in [15001, 15006, 15008] {
                ensure!(
                    rules.listening_ports.contains(&port),
                    "{name} has no {port}"
                );
            }
        } else {
            ensure!(
                subject.pod.traces()? == NOTHING,
                "{name}: {:?}",
                subject.pod.traces()?
            );
        }
        let object = self.cluster.server.get(&self.cluster.path(name))?;
        let annotation = object.pointer("/metadata/annotations/ambient.istio.io~1redirection");
        let expected = wanted.then(|| Value::from("enabled"));
        ensure!(
            annotation == expected.as_ref(),
            "{name} is annotated {annotation:?}"
        );
        Ok(())
    }

    fn is_nothing_leaked(&self) -> anyhow::Result<()> {
        let node = &self.cluster.node;
        let inside = self
            .subjects
            .values()
            .filter(|it| self.is_wanted(it))
            .count();
        let claims = node.api().claims()?;
        ensure!(claims.len() == inside, "{inside} are inside: {claims:?}");
        let workloads = node.api().workloads()?.workloads;
        ensure!(
            workloads.len() == inside,
            "{inside} are inside: {workloads:?}"
        );
        let [ztunnel] = &self.ztunnels[..] else {
            anyhow::bail!("a ztunnel takes over");
        };
        let (is_ready, pods) = ztunnel.state(node)?;
        ensure!(
            is_ready && pods.len() == inside,
            "{inside} are inside: {pods:?}"
        );
        let sent = netns_held(node.pid("ztunnel-broker")?)?;
        ensure!(
            sent == inside,
            "the broker holds {sent} netns of {inside} pods"
        );
        let records = files(&node.run_dir().join("pod-events/pods"))?;
        ensure!(records.len() == self.subjects.len(), "{records:?}");
        let spooled = files(&node.state_dir().join("spool"))?;
        ensure!(spooled.is_empty(), "{spooled:?}");
        let let_through = node.api().list(ListPodsRequest {
            let_through: true,
            ..ListPodsRequest::default()
        })?;
        ensure!(let_through.is_empty(), "{let_through:?}");
        let held = netns_held(node.pid("netconfig")?)?;
        // Its own and the node's.
        ensure!(
            held <= inside + 4,
            "netconfig holds {held} netns of {inside} pods"
        );
        let elements = self.probe_elements()?;
        ensure!(
            elements == 2 * inside,
            "{elements} probe elements of {inside} pods"
        );
        Ok(())
    }

    fn probe_elements(&self) -> anyhow::Result<usize> {
        let node = self.cluster.node.netns();
        let text = node.within(|| {
            std::process::Command::new("nft")
                .args(["-j", "list", "sets"])
                .output()
        })??;
        let listed: Value = serde_json::from_slice(&text.stdout)?;
        let sets = listed.pointer("/nftables").and_then(Value::as_array);
        let elements = |set: &Value| {
            set.pointer("/set/elem")
                .and_then(Value::as_array)
                .map(Vec::len)
        };
        Ok(sets.into_iter().flatten().filter_map(elements).sum())
    }
}

fn files(directory: &Path) -> anyhow::Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

fn netns_held(pid: u32) -> anyhow::Result<usize> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let is_netns = |link: &std::path::PathBuf| {
        let link = link.to_string_lossy();
        link.starts_with("net:") || link.starts_with("/run/netns/")
    };
    Ok(links.filter(is_netns).count())
}
