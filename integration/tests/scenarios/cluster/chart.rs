//! inpod as a person installs it: by helm, which keeps its releases in the API server.
//!
//! A release differs from the chart's defaults only as a test sets. Images have the names that `deploy/images/build`
//! gives them and are imported, so no registry is asked; `Image::Shipped` lists their differences. The kubelet shows
//! a changed ConfigMap sooner than by default (`syncFrequency` in `src/kubernetes/files.rs`).

use anyhow::{bail, ensure};
use integration::{
    eventually,
    kubernetes::{LONG, text},
};
use serde_json::json;

use crate::cluster::agent::{ExclusiveCluster, SYSTEM, uid};

pub(crate) const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/inpod");

/// Images that no node has.
const ABSENT: [&str; 4] = [
    "netconfig.image=localhost/absent:1",
    "ztunnelBroker.image=localhost/absent:1",
    "podEvents.image=localhost/absent:1",
    "installer.image=localhost/absent:1",
];

impl ExclusiveCluster<'_> {
    /// Runs as in `deploy/docs/install.md`.
    pub(crate) fn install(&self) {
        self.make_system();
        self.upgrade(&[]);
    }

    pub(crate) fn make_system(&self) {
        let labels = json!({"pod-security.kubernetes.io/enforce": "privileged"});
        self.make_namespace(SYSTEM, &labels).unwrap();
    }

    /// Installs the chart with these values alone, or changes the release to them.
    pub(crate) fn upgrade(&self, values: &[&str]) {
        let release = ["upgrade", "--install", "inpod", CHART, "--reset-values"];
        self.helm_with(&release, values).unwrap();
    }

    /// Runs helm with values, for images that are on the node.
    pub(crate) fn helm_with(&self, arguments: &[&str], values: &[&str]) -> anyhow::Result<String> {
        let values = values.iter().chain(&["pullPolicy=Never"]);
        let set: Vec<_> = values.flat_map(|value| ["--set", value]).collect();
        self.helm(&[arguments, &["--namespace", SYSTEM], &set].concat())
    }

    /// Installs a release whose agent cannot start, because the node lacks its images.
    pub(crate) fn install_without_images(&self, values: &[&str]) {
        self.make_system();
        self.upgrade(&[values, &ABSENT].concat());
    }

    /// Runs `helm uninstall`, whose Job ends only if every node is done, and `kubectl delete namespace`.
    pub(crate) fn uninstall(&self) {
        self.delete_release(&["--timeout", "270s"]);
    }

    pub(crate) fn delete_release(&self, flags: &[&str]) {
        let command = ["uninstall", "inpod", "--namespace", SYSTEM];
        self.helm(&[&command[..], flags].concat()).unwrap();
        let path = format!("/api/v1/namespaces/{SYSTEM}");
        self.server.delete(&path).unwrap();
        eventually("nothing of the release is there", LONG, || {
            match self.server.get(&path) {
                Err(_) => Ok(()),
                Ok(_) => bail!("{:?}", self.pods(SYSTEM, "")),
            }
        })
        .unwrap();
    }

    pub(crate) fn images(&self) -> Vec<String> {
        let agent = self.agent();
        let containers = agent.pointer("/status/containerStatuses").unwrap();
        let containers = containers.as_array().unwrap().iter();
        let images = containers.map(|container| text(container, "/image").to_owned());
        images.collect()
    }

    pub(crate) fn until_replaced(&self, before: &serde_json::Value) {
        eventually("another agent is ready", LONG, || {
            let now = self.agent();
            ensure!(uid(&now) != uid(before), "the old one");
            anyhow::Ok(())
        })
        .unwrap();
    }
}
