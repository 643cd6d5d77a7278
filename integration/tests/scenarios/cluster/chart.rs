//! inpod as a person installs it: what helm renders is applied and deleted as helm does it.
//!
//! A release differs from the chart's defaults only as a test sets. Images have the names that `deploy/images/build`
//! gives them and are imported, so no registry is asked; `Image::Shipped` lists their differences. The kubelet shows
//! a changed ConfigMap sooner than by default (`syncFrequency` in `src/kubernetes/files.rs`).

use anyhow::{Context as _, bail, ensure};
use integration::{
    eventually,
    kubernetes::{LONG, is, text},
    run,
};
use serde_json::json;

use crate::cluster::agent::{ExclusiveCluster, SYSTEM, uid};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/inpod");

const HOOK: [&str; 2] = ["--show-only", "templates/leave-job.yaml"];

/// Everything except the hook.
const RELEASE: [&str; 1] = ["--no-hooks"];

/// Facts that helm learns from the server, as `deploy/render` passes them.
const SERVER: [&str; 4] = [
    "--kube-version",
    "v1.34.0",
    "--api-versions",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
];

/// The Job waits four minutes for its nodes (`leave.timeoutSeconds`).
const UNINSTALL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(270);

fn rendered(what: &[&str], values: &[&str]) -> anyhow::Result<String> {
    let helm = std::env::var_os("HELM").and_then(|path| path.into_string().ok());
    let helm = helm.context("HELM names no program: run ./integration/test kubernetes")?;
    let release = ["template", "inpod", CHART, "--namespace", SYSTEM];
    // The images are imported on the node.
    let values = values.iter().chain(&["pullPolicy=Never"]);
    let set = values.flat_map(|value| ["--set", value]);
    let set: Vec<_> = set.collect();
    run(&helm, &[&release[..], &SERVER, what, &set].concat())
}

fn identity(document: &str) -> Option<(&str, &str)> {
    let after = |start| document.lines().find_map(|line| line.strip_prefix(start));
    Some((after("kind: ")?, after("  name: ")?))
}

fn select(rendering: &str, is_meant: impl Fn((&str, &str)) -> bool) -> String {
    let documents = rendering.split("\n---\n");
    let chosen = documents.filter(|document| identity(document).is_some_and(&is_meant));
    chosen.collect::<Vec<_>>().join("\n---\n")
}

impl ExclusiveCluster<'_> {
    /// Runs as in `deploy/docs/install.md`: `kubectl create namespace`, `kubectl label namespace`, `helm install`.
    pub(crate) fn install(&self) {
        self.make_system();
        self.upgrade(&[]);
    }

    fn make_system(&self) {
        let labels = json!({"pod-security.kubernetes.io/enforce": "privileged"});
        self.make_namespace(SYSTEM, &labels).unwrap();
    }

    pub(crate) fn upgrade(&self, values: &[&str]) {
        let release = rendered(&RELEASE, values).unwrap();
        self.server.apply(&release).unwrap();
    }

    /// Runs `helm upgrade`: objects no longer in the release are deleted.
    pub(crate) fn upgrade_from(&self, before: &[&str], after: &[&str]) {
        let [before, after] = [before, after].map(|values| rendered(&RELEASE, values).unwrap());
        self.server.apply(&after).unwrap();
        let stays: Vec<_> = after.split("\n---\n").filter_map(identity).collect();
        let gone = select(&before, |object| !stays.contains(&object));
        self.server.remove(&gone).unwrap();
    }

    /// Runs `helm install` on a node that the agent has not reached yet.
    pub(crate) fn install_all_but_the_agent(&self, values: &[&str]) {
        self.make_system();
        let release = rendered(&RELEASE, values).unwrap();
        let others = select(&release, |object| object != ("DaemonSet", "inpod"));
        self.server.apply(&others).unwrap();
    }

    /// Runs `helm uninstall` and `kubectl delete namespace`; returns the Job's output.
    pub(crate) fn uninstall(&self) -> String {
        let hook = rendered(&HOOK, &[]).unwrap();
        self.server.apply(&hook).unwrap();
        let said = eventually("the Job has ended", UNINSTALL_TIMEOUT, || {
            let path = format!("/apis/batch/v1/namespaces/{SYSTEM}/jobs/inpod-leave");
            let job = self.server.get(&path)?;
            let pods = self.pods(SYSTEM, "app.kubernetes.io/name=inpod-leave")?;
            let pod = pods.first().context("its pod is not there yet")?;
            let said = self.machine.log_of(text(pod, "/metadata/uid"))?;
            ensure!(is(&job, "Complete") || is(&job, "Failed"), "{said}");
            anyhow::Ok((is(&job, "Complete"), said))
        });
        let (is_complete, said) = said.unwrap();
        assert!(is_complete, "{said}");
        self.server.remove(&hook).unwrap();
        self.delete_release();
        said
    }

    /// Runs `helm uninstall --no-hooks` and `kubectl delete namespace`.
    pub(crate) fn delete_release(&self) {
        let release = rendered(&RELEASE, &[]).unwrap();
        self.server.remove(&release).unwrap();
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
