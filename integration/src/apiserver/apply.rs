//! Applies and deletes manifests, like a person with kubectl or helm does.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use inpod_linux::Netns;

use super::ApiServer;

fn collection(kind: &str) -> anyhow::Result<(&'static str, &'static str, bool)> {
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let admission = "/apis/admissionregistration.k8s.io/v1";
    Ok(match kind {
        "Namespace" => ("/api/v1", "namespaces", false),
        "ConfigMap" => ("/api/v1", "configmaps", true),
        "ServiceAccount" => ("/api/v1", "serviceaccounts", true),
        "Service" => ("/api/v1", "services", true),
        "Deployment" => ("/apis/apps/v1", "deployments", true),
        "PeerAuthentication" => ("/apis/security.istio.io/v1", "peerauthentications", true),
        "AuthorizationPolicy" => ("/apis/security.istio.io/v1", "authorizationpolicies", true),
        "EnvoyFilter" => ("/apis/networking.istio.io/v1alpha3", "envoyfilters", true),
        "Sidecar" => ("/apis/networking.istio.io/v1", "sidecars", true),
        "DaemonSet" => ("/apis/apps/v1", "daemonsets", true),
        "ClusterRole" => (rbac, "clusterroles", false),
        "ClusterRoleBinding" => (rbac, "clusterrolebindings", false),
        "ValidatingAdmissionPolicy" => (admission, "validatingadmissionpolicies", false),
        "ValidatingAdmissionPolicyBinding" => {
            (admission, "validatingadmissionpolicybindings", false)
        }
        other => bail!("the harness knows no objects of kind {other}"),
    })
}

/// Returns the path of a document's object. The document must be indented by two spaces, as helm and people write.
fn path(document: &str) -> anyhow::Result<String> {
    let after = |start: &str| {
        let mut lines = document.lines();
        let value = lines.find_map(|line| line.strip_prefix(start).map(str::trim));
        value.map(|value| value.trim_matches('"'))
    };
    let (group, plural, is_namespaced) = collection(after("kind: ").context("no kind")?)?;
    let name = after("  name: ").context("no name")?;
    if !is_namespaced {
        return Ok(format!("{group}/{plural}/{name}"));
    }
    let namespace = after("  namespace: ").context("no namespace")?;
    Ok(format!("{group}/namespaces/{namespace}/{plural}/{name}"))
}

fn documents(manifest: &str) -> Vec<&str> {
    let is_object = |document: &&str| document.lines().any(|line| line.starts_with("kind: "));
    manifest.split("\n---\n").filter(is_object).collect()
}

impl ApiServer {
    /// Deletes the objects of a manifest, the last one first, with background propagation like helm.
    pub fn remove(&self, manifest: &str) -> anyhow::Result<()> {
        let how = serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
        for document in documents(manifest).into_iter().rev() {
            let path = path(document)?;
            self.delete_with(&path, &how)
                .with_context(|| format!("cannot delete {path}"))?;
        }
        Ok(())
    }

    /// Applies the documents in their order, by server-side apply.
    pub fn apply(&self, manifest: &str) -> anyhow::Result<()> {
        for document in documents(manifest) {
            let path = path(document)?;
            let asked = format!("{path}?fieldManager=test&force=true");
            let content = "application/apply-patch+yaml";
            self.curl("PATCH", &asked, content, Some(document))
                .with_context(|| format!("cannot apply {path}"))?;
        }
        Ok(())
    }

    /// Deletes an object with the given options; without a grace period in the options, the object's own period holds.
    pub fn delete_with(&self, path: &str, options: &serde_json::Value) -> anyhow::Result<()> {
        let options = options.to_string();
        self.curl("DELETE", path, "application/json", Some(&options))
            .map(drop)
    }

    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn authority(&self) -> PathBuf {
        self.file("certs/apiserver.crt")
    }

    pub(crate) fn kubeconfig_of(token: &str, authority: &str) -> String {
        serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": {
                "server": format!("https://{}:6443", super::ADDRESS),
                "certificate-authority": authority,
            }}],
            "users": [{"name": "it", "user": {"token": token}}],
        })
        .to_string()
    }
}
