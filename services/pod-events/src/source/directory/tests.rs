use std::time::Duration;

use super::*;

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: web, uid: u1}\nspec: {containers: []}\n";

fn node() -> NodeName {
    "node-1".parse().unwrap()
}

fn parse(text: &str) -> Result<Vec<Manifest>, String> {
    manifest::parse(text, &node()).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

#[test]
fn a_pod_as_kubectl_writes_it_is_stripped_to_what_is_read() {
    let text = r#"
apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: "2026-11-21T07:43:00Z"
  name: web-0
  namespace: shop
  uid: 11111111-2222-3333-4444-555555555555
  labels: {app: web, istio.io/dataplane-mode: ambient}
  annotations: {"kubernetes.io/x": "y"}
  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: web, uid: x}]
spec:
  containers: [{name: c, image: i, resources: {limits: {cpu: 500m}}, ports: [{containerPort: 80}]}]
  nodeName: node-1
  serviceAccountName: sa
  tolerations: [{effect: NoExecute, key: k, operator: Exists, tolerationSeconds: 300}]
status:
  phase: Running
  podIPs: [{ip: 10.0.0.1}]
---
"#;
    let manifests = parse(text).unwrap();
    let [Manifest::Pod(pod)] = &manifests[..] else {
        panic!("{manifests:?}")
    };
    assert_eq!(pod.pod.to_string(), "shop/web-0");
    assert_eq!(pod.service_account.as_str(), "sa");
    assert_eq!(pod.dataplane_mode.as_deref(), Some("ambient"));
    assert!(!pod.terminal && !pod.host_network && !pod.has_sidecar);
}

#[test]
fn several_documents_and_lists_are_read() {
    let list = "kind: List\nitems:\n- {kind: Namespace, metadata: {name: shop}}\n";
    assert_eq!(parse(&format!("{POD}---\n{list}")).unwrap().len(), 2);
}

#[test]
fn a_pod_without_uid_is_refused_by_name() {
    let error = parse(&POD.replace(", uid: u1", "")).unwrap_err();
    assert!(
        error.contains("Pod shop/web") && error.contains("metadata.uid is required"),
        "{error}"
    );
}

#[test]
fn a_pod_of_another_node_is_refused_naming_both() {
    let error = parse(&POD.replace("spec: {", "spec: {nodeName: node-2, ")).unwrap_err();
    assert!(
        error.contains("node-2") && error.contains("node-1"),
        "{error}"
    );
}

#[test]
fn another_kind_and_another_form_are_refused_by_name() {
    assert!(
        parse("kind: Deployment\n")
            .unwrap_err()
            .contains("Deployment")
    );
    let error = parse(&POD.replace("containers: []", "containers: 7")).unwrap_err();
    assert!(error.contains("Pod shop/web"), "{error}");
    assert!(parse("a: [").unwrap_err().contains("no YAML"));
}

async fn until(
    inventory: &mut watch::Receiver<Arc<Inventory>>,
    wanted: impl Fn(&Inventory) -> bool,
) {
    let seen = inventory.wait_for(|inventory| wanted(inventory));
    tokio::time::timeout(Duration::from_secs(5), seen)
        .await
        .expect("not seen in time")
        .unwrap();
}

fn enrolled(inventory: &Inventory) -> bool {
    inventory
        .pods
        .values()
        .any(|pod| pod.dataplane_mode.is_some())
}

#[tokio::test]
async fn the_directory_is_watched_live() {
    let dir = tempfile::tempdir().unwrap();
    let (mut inventory, _reread) = watch(dir.path().to_owned(), node()).await.unwrap();
    assert!(inventory.borrow().pods.is_empty());
    let file = dir.path().join("web.yaml");
    fs::write(&file, POD).unwrap();
    until(&mut inventory, |inventory| inventory.pods.len() == 1).await;
    fs::write(
        &file,
        POD.replace(
            "uid: u1",
            "uid: u1, labels: {istio.io/dataplane-mode: ambient}",
        ),
    )
    .unwrap();
    until(&mut inventory, enrolled).await;
    fs::remove_file(&file).unwrap();
    until(&mut inventory, |inventory| inventory.pods.is_empty()).await;
}

#[tokio::test]
async fn a_file_that_breaks_keeps_what_it_said_before() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("web.yaml"), POD).unwrap();
    let (mut inventory, _reread) = watch(dir.path().to_owned(), node()).await.unwrap();
    fs::write(dir.path().join("web.yaml"), "kind: Pod\nmetadata: {name: [").unwrap();
    // A second file tells when the first has been read again.
    fs::write(
        dir.path().join("ns.yaml"),
        "kind: Namespace\nmetadata: {name: shop}\n",
    )
    .unwrap();
    until(&mut inventory, |inventory| inventory.namespaces.len() == 1).await;
    assert_eq!(inventory.borrow().pods.len(), 1);
}

#[tokio::test]
async fn a_directory_that_is_missing_is_named() {
    let error = watch("/nonexistent/pods".into(), node()).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/pods"), "{error}");
}

#[tokio::test]
async fn of_two_manifests_of_one_pod_the_first_file_holds() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.yaml"), POD).unwrap();
    fs::write(dir.path().join("b.yaml"), POD.replace("u1", "u2")).unwrap();
    let (inventory, _reread) = watch(dir.path().to_owned(), node()).await.unwrap();
    let inventory = inventory.borrow();
    assert_eq!(
        inventory
            .pods
            .values()
            .map(|pod| pod.pod.uid.as_str())
            .collect::<Vec<_>>(),
        ["u1"]
    );
}
