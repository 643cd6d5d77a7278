//! The end: everything runs again, and each pod is checked.

use std::{fs, time::Instant};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{Call, eventually};
use serde_json::Value;

use crate::{Chaos, SETTLE_TIMEOUT, Subject};

const NOTHING: [String; 0] = [];

impl Chaos {
    /// Restarts everything and repeats failed calls.
    pub(crate) fn settle(&mut self) {
        self.restart_due(Instant::now() + SETTLE_TIMEOUT);
        self.cluster.until_served();
        for subject in self.subjects.values_mut() {
            if let Some(adding) = subject.adding.take() {
                subject.added |= adding.join().unwrap().code == 0;
            }
        }
        for subject in self.subjects.values().filter(|subject| !subject.added) {
            eventually("a repeated ADD succeeds", SETTLE_TIMEOUT, || {
                let outcome = self.cluster.node.call(Call::add, &subject.pod).run()?;
                ensure!(outcome.code == 0, "{outcome:?}");
                anyhow::Ok(())
            })
            .unwrap();
        }
    }

    fn is_wanted(&self, subject: &Subject) -> bool {
        match subject.mode {
            Some("ambient") => true,
            Some(_) => false,
            None => self.is_namespace_in,
        }
    }

    pub(crate) fn is_as_wanted(&self, name: &str, subject: &Subject) -> anyhow::Result<()> {
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

    pub(crate) fn is_nothing_leaked(&self) -> anyhow::Result<()> {
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

fn files(directory: &std::path::Path) -> anyhow::Result<Vec<String>> {
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
