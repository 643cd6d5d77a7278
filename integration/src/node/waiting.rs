//! Waits until a node reaches a state.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ExplainPodResponse, PodState};
use tonic_health::pb::health_check_response::ServingStatus;

use super::Node;
use crate::{Spec, TIMEOUT, eventually, health};

impl Node {
    /// Waits until the agent serves ADD and a ztunnel is up to date.
    pub fn ready(&self) -> anyhow::Result<()> {
        eventually(
            "the agent is ready and a ztunnel is up to date",
            TIMEOUT,
            || {
                let status = self.api.status()?;
                let bad: Vec<_> = status
                    .conditions
                    .iter()
                    .filter(|condition| !condition.ok)
                    .collect();
                // pod-events reports the condition only once the broker is connected.
                let told = |name| status.conditions.iter().any(|known| known.name == name);
                ensure!(status.ready && bad.is_empty() && told("ztunnel"), "{bad:?}");
                anyhow::Ok(())
            },
        )
    }

    /// Waits until a service reports that it is ready.
    pub fn healthy(&self, service: &str) -> anyhow::Result<()> {
        let socket = inpod_service::socket(&self.run_dir(), service);
        eventually(&format!("{service} is ready"), TIMEOUT, || {
            let status = health(&socket, "")?;
            ensure!(status == ServingStatus::Serving, "{status:?}");
            anyhow::Ok(())
        })
    }

    pub fn explain(&self, spec: &Spec) -> anyhow::Result<ExplainPodResponse> {
        self.api.explain(&spec.namespace, &spec.name)
    }

    pub fn until(
        &self,
        spec: &Spec,
        state: PodState,
        patience: Duration,
    ) -> anyhow::Result<ExplainPodResponse> {
        eventually(
            &format!("{} is {}", spec.name, state.as_str_name()),
            patience,
            || {
                let known = self.explain(spec)?;
                ensure!(known.state() == state, "{known:?}");
                anyhow::Ok(known)
            },
        )
    }

    /// Waits until the pod is enrolled with exactly its rules, and acknowledged by a ztunnel.
    pub fn until_whole(&self, spec: &Spec) -> anyhow::Result<ExplainPodResponse> {
        eventually(
            &format!("{} is wholly in the mesh", spec.name),
            TIMEOUT,
            || {
                let known = self.explain(spec)?;
                ensure!(known.state() == PodState::Enrolled, "{known:?}");
                let rules = known.rules.as_ref().context("no rules reported")?;
                ensure!(!rules.fingerprint.is_empty(), "the rules were not compared");
                ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
                ensure!(
                    known
                        .ztunnels
                        .iter()
                        .any(|ztunnel| ztunnel.state == "added"),
                    "{:?}",
                    known.ztunnels
                );
                anyhow::Ok(known)
            },
        )
    }
}
