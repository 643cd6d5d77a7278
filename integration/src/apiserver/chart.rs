//! What the chart deploys, rendered for the server as helm would, and the identity that it gives pod-events.

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{ADDRESS, ApiServer};

/// The identities and their rights, as they are deployed.
const TEMPLATES: [&str; 4] = [
    RBAC,
    include_str!("../../../deploy/helm/inpod/templates/pod-events-policy.yaml"),
    include_str!("../../../deploy/helm/inpod/templates/netconfig-rbac.yaml"),
    include_str!("../../../deploy/helm/inpod/templates/ztunnel-broker-rbac.yaml"),
];
const RBAC: &str = include_str!("../../../deploy/helm/inpod/templates/pod-events-rbac.yaml");

/// The namespace that inpod is deployed to.
const RELEASE: &str = "inpod-system";

/// The one guard that a template may have: the server has these objects.
const GUARD: &str = r#"{{- if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" }}"#;

impl ApiServer {
    /// The namespace of inpod, and everything of the chart in it.
    pub(super) fn deploy(&self) -> anyhow::Result<()> {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RELEASE}});
        self.create("/api/v1/namespaces", &namespace)?;
        for template in TEMPLATES {
            let rendered = render(template)?;
            rendered
                .split("\n---\n")
                .try_for_each(|document| self.create_yaml(document))?;
        }
        Ok(())
    }

    /// A token of pod-events on a node. It is bound to an agent's pod there, which is made, as a kubelet has it for a
    /// pod that it runs; so the node stands in it.
    ///
    /// # Errors
    ///
    /// When the server gives none.
    pub fn token(&self, node: &str) -> anyhow::Result<String> {
        let name = format!("pod-events-{node}");
        let agent = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": RELEASE},
            "spec": {
                "nodeName": node,
                "hostNetwork": true,
                "serviceAccountName": "pod-events",
                "containers": [{"name": "pod-events", "image": "pod-events"}],
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
        let path = format!("/api/v1/namespaces/{RELEASE}/serviceaccounts/pod-events/token");
        let answer = self.create(&path, &request)?;
        let token = answer.pointer("/status/token").and_then(Value::as_str);
        Ok(token.context("no token")?.to_owned())
    }

    /// A kubeconfig with the identity of pod-events on a node.
    ///
    /// # Errors
    ///
    /// As [`Self::token`].
    pub fn kubeconfig(&self, node: &str) -> anyhow::Result<String> {
        let token = self.token(node)?;
        let authority = self.dir.join("certs/apiserver.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": {
                "server": format!("https://{ADDRESS}:6443"),
                "certificate-authority": authority,
            }}],
            "users": [{"name": "it", "user": {"token": token}}],
        });
        Ok(config.to_string())
    }

    /// Makes one of the objects that are deployed.
    ///
    /// # Errors
    ///
    /// When the server refuses.
    fn create_yaml(&self, document: &str) -> anyhow::Result<()> {
        let kind = document
            .lines()
            .find_map(|line| line.strip_prefix("kind: "));
        let path = match kind.context("a document has a kind")? {
            "ServiceAccount" => "/api/v1/namespaces/inpod-system/serviceaccounts",
            "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            "ValidatingAdmissionPolicy" => {
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
            }
            "ValidatingAdmissionPolicyBinding" => {
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
            }
            other => bail!("{other} is not deployed"),
        };
        self.curl("POST", path, "application/yaml", Some(document))
            .map(drop)
    }

    /// Makes the binding again that was deleted.
    ///
    /// # Errors
    ///
    /// When the server refuses.
    pub fn bind_again(&self) -> anyhow::Result<()> {
        let rendered = render(RBAC)?;
        let binding = rendered.rsplit("\n---\n").next();
        self.create_yaml(binding.context("the last document is the binding")?)
    }
}

/// What helm makes of a template for a server that has everything: it may name the release's namespace and ask for one
/// capability, nothing else.
fn render(template: &str) -> anyhow::Result<String> {
    let guarded = template
        .strip_prefix(GUARD)
        .and_then(|rest| rest.trim_end().strip_suffix("{{- end }}"));
    let rendered = guarded
        .unwrap_or(template)
        .replace("{{ .Release.Namespace }}", RELEASE);
    ensure!(!rendered.contains("{{"), "not rendered: {rendered}");
    Ok(rendered.trim().to_owned())
}
