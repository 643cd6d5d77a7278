//! Manifests as a real API server accepts them: no refusal, unknown field or warning.

use std::{fs, path::Path};

use integration::ApiServer;

fn path(manifest: &str) -> String {
    let field = |name: &str| {
        let mut lines = manifest.lines();
        lines.find_map(|line| line.strip_prefix(name)).unwrap()
    };
    let (kind, name) = (field("kind: "), field("  name: "));
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let admission = "/apis/admissionregistration.k8s.io/v1";
    let own = "namespaces/inpod-system";
    let place = match kind {
        "Namespace" => "/api/v1/namespaces".to_owned(),
        "ServiceAccount" => format!("/api/v1/{own}/serviceaccounts"),
        "ConfigMap" => format!("/api/v1/{own}/configmaps"),
        "ResourceQuota" => format!("/api/v1/{own}/resourcequotas"),
        "Service" => format!("/api/v1/{own}/services"),
        "Deployment" => format!("/apis/apps/v1/{own}/deployments"),
        "MutatingWebhookConfiguration" => format!("{admission}/mutatingwebhookconfigurations"),
        "DaemonSet" => format!("/apis/apps/v1/{own}/daemonsets"),
        "Job" => format!("/apis/batch/v1/{own}/jobs"),
        "ClusterRole" => format!("{rbac}/clusterroles"),
        "ClusterRoleBinding" => format!("{rbac}/clusterrolebindings"),
        "Role" => format!("{rbac}/{own}/roles"),
        "RoleBinding" => format!("{rbac}/{own}/rolebindings"),
        "ValidatingAdmissionPolicy" => format!("{admission}/validatingadmissionpolicies"),
        "ValidatingAdmissionPolicyBinding" => {
            format!("{admission}/validatingadmissionpolicybindings")
        }
        other => panic!("{other} is not deployed"),
    };
    format!("{place}/{name}")
}

fn file(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join("deploy/manifests").join(name)).unwrap()
}

#[test]
fn the_server_takes_every_manifest_and_warns_of_nothing() {
    let server = ApiServer::shared().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut taken = 0;
    for entry in fs::read_dir(root.join("deploy/manifests")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        for manifest in file(&name).split("\n---\n").skip(1) {
            let warnings = server.warnings(&path(manifest), manifest);
            let warnings = warnings.unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert!(warnings.is_empty(), "{name}: {warnings:?}\n{manifest}");
            taken += 1;
        }
    }
    assert!(taken > 60, "{taken} objects");
}

fn changed(from: &str, to: &str) -> String {
    let text = file("combined.yaml");
    let mut all = text.split("\n---\n");
    let daemon_set = all.find(|it| it.contains("\nkind: DaemonSet\n")).unwrap();
    assert!(daemon_set.contains(from));
    daemon_set.replacen(from, to, 1)
}

#[test]
fn a_field_that_the_server_does_not_know_is_found_out() {
    let server = ApiServer::shared().unwrap();
    let wrong = changed("hostPID: true", "hostPid: true");
    let error = server.warnings(&path(&wrong), &wrong).unwrap_err();
    assert!(format!("{error:#}").contains("hostPid"), "{error:#}");
}

#[test]
fn what_the_server_warns_of_is_found_out() {
    let server = ApiServer::shared().unwrap();
    let old = changed("{\"kubernetes.io/os\":", "{\"beta.kubernetes.io/os\":");
    let warnings = server.warnings(&path(&old), &old).unwrap().join("\n");
    assert!(warnings.contains("beta.kubernetes.io/os"), "{warnings}");
}
