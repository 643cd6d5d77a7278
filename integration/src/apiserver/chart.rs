//! Deploys the identities of the rendered chart, and issues tokens of pod-events.

use std::{io::Write as _, path::Path, process::Stdio};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{ADDRESS, ApiServer, enter};
use crate::process::succeeded;

/// The manifest in which the broker runs apart, because only this manifest contains every identity.
const MANIFESTS: &str = include_str!("../../../deploy/manifests/split.yaml");

/// The namespace to which inpod is deployed.
const RELEASE: &str = "inpod-system";

impl ApiServer {
    /// Creates inpod's namespace, identities and rights. DaemonSets are not created, because no kubelet would run their
    /// pods.
    pub(super) fn deploy(&self) -> anyhow::Result<()> {
        documents().try_for_each(|document| self.create_yaml(document))
    }

    /// Returns a token of pod-events that names the node. Like a token requested by the kubelet, the token is bound to
    /// a pod of the agent on this node.
    pub fn token(&self, node: &str) -> anyhow::Result<String> {
        self.token_of("pod-events", node)
    }

    pub fn token_of(&self, account: &str, node: &str) -> anyhow::Result<String> {
        let name = format!("{account}-{node}");
        let agent = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": RELEASE},
            "spec": {
                "nodeName": node,
                "hostNetwork": true,
                "serviceAccountName": account,
                "containers": [{"name": "agent", "image": "agent"}],
            },
        });
        let agent = self.create(&format!("/api/v1/namespaces/{RELEASE}/pods"), &agent)?;
        let uid = agent.pointer("/metadata/uid").context("a pod has a UID")?;
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid});
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"boundObjectRef": bound},
        });
        let path = format!("/api/v1/namespaces/{RELEASE}/serviceaccounts/{account}/token");
        let answer = self.create(&path, &request)?;
        let token = answer.pointer("/status/token").and_then(Value::as_str);
        Ok(token.context("no token")?.to_owned())
    }

    pub fn kubeconfig(&self, node: &str) -> anyhow::Result<String> {
        self.kubeconfig_for("pod-events", node)
    }

    pub fn kubeconfig_for(&self, account: &str, node: &str) -> anyhow::Result<String> {
        let token = self.token_of(account, node)?;
        let authority = self.authority().display().to_string();
        Ok(Self::kubeconfig_of(&token, &authority))
    }

    /// Creates the object of a document, or skips the object if no component of the tests would run it.
    fn create_yaml(&self, document: &str) -> anyhow::Result<()> {
        let path = match kind(document)? {
            "Namespace" => "/api/v1/namespaces",
            "ServiceAccount" => "/api/v1/namespaces/inpod-system/serviceaccounts",
            "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            "ValidatingAdmissionPolicy" => {
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
            }
            "ValidatingAdmissionPolicyBinding" => {
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
            }
            "ConfigMap" | "DaemonSet" => return Ok(()),
            other => bail!("{other} is not deployed"),
        };
        self.curl("POST", path, "application/yaml", Some(document))
            .map(drop)
    }

    /// Returns the warnings of the server about a manifest, from a dry run. Unknown and duplicate fields are errors.
    pub fn warnings(&self, path: &str, manifest: &str) -> anyhow::Result<Vec<String>> {
        let mut command = enter(&self.netns, Path::new("curl"));
        command
            .args(["--silent", "--show-error", "--include", "--max-time", "20"])
            .arg("--cacert")
            .arg(self.dir.join("certs/apiserver.crt"))
            .args(["-X", "PATCH", "-H", "Authorization: Bearer admin"])
            .args(["-H", "Content-Type: application/apply-patch+yaml"])
            .args(["--data-binary", "@-"])
            .arg(format!("https://{ADDRESS}:6443{path}?dryRun=All&fieldManager=test&force=true&fieldValidation=Strict"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot run curl")?;
        let stdin = child.stdin.take().context("curl has a standard input")?;
        { stdin }.write_all(manifest.as_bytes())?;
        let text = succeeded("curl", &child.wait_with_output()?)?;
        let status = text.split_whitespace().nth(1).unwrap_or_default();
        ensure!(matches!(status, "200" | "201"), "{path}: {text}");
        let head = text.split("\r\n\r\n").next().unwrap_or_default();
        let is_warning = |line: &&str| line.to_lowercase().starts_with("warning:");
        Ok(head.lines().filter(is_warning).map(str::to_owned).collect())
    }
}

fn documents() -> impl Iterator<Item = &'static str> {
    MANIFESTS.split("\n---\n").skip(1)
}

fn kind(document: &str) -> anyhow::Result<&str> {
    let mut lines = document.lines();
    let kind = lines.find_map(|line| line.strip_prefix("kind: "));
    kind.context("a document has a kind")
}
