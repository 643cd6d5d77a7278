use std::time::Duration;

use super::*;

const NAMESPACE: &str = "kind: Namespace\nmetadata: {name: shop}\n";
const BROKEN: &str = "kind: Pod\nmetadata: {name: [";
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop, name: web, uid: u1}\nspec: {containers: []}\n";

fn scope() -> Scope {
    Scope {
        node: "node-1".parse().unwrap(),
        namespace_labels: Arc::default(),
    }
}

fn parse(text: &str) -> Result<Vec<Manifest>, String> {
    manifest::parse(text, &scope()).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

#[test]
fn a_pod_as_kubectl_writes_it_is_reduced_to_the_used_fields() {
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
    assert_eq!(pod.labels.len(), 2);
    assert!(!pod.terminal && !pod.host_network && pod.injection.is_none());
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
    assert!(parse("a: [").unwrap_err().contains("invalid YAML"));
}

async fn until(
    inventory: &mut watch::Receiver<Arc<Inventory>>,
    wanted: impl Fn(&Inventory) -> bool,
) {
    let reached = inventory.wait_for(|inventory| wanted(inventory));
    tokio::time::timeout(Duration::from_secs(20), reached)
        .await
        .expect("not seen in time")
        .unwrap();
}

fn enrolled(inventory: &Inventory) -> bool {
    inventory.pods.values().any(|pod| !pod.labels.is_empty())
}

#[tokio::test]
async fn the_directory_is_watched_live() {
    let dir = tempfile::tempdir().unwrap();
    let (mut inventory, _reread) = watch(dir.path().to_owned(), scope(), CHECK_INTERVAL)
        .await
        .unwrap();
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
async fn a_file_that_breaks_keeps_its_previous_content() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("web.yaml"), POD).unwrap();
    let (mut inventory, _reread) = watch(dir.path().to_owned(), scope(), CHECK_INTERVAL)
        .await
        .unwrap();
    fs::write(dir.path().join("web.yaml"), BROKEN).unwrap();
    // The second file shows when the first has been read again.
    fs::write(dir.path().join("ns.yaml"), NAMESPACE).unwrap();
    until(&mut inventory, |inventory| inventory.namespaces.len() == 1).await;
    assert_eq!(inventory.borrow().pods.len(), 1);
    assert!(inventory.borrow().is_complete());
}

#[tokio::test]
async fn a_file_that_never_could_be_used_leaves_the_inventory_incomplete_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let [start, new] = ["start.yaml", "new.yaml"].map(|name| dir.path().join(name));
    fs::write(&start, BROKEN).unwrap();
    let (mut inventory, _reread) = watch(dir.path().to_owned(), scope(), CHECK_INTERVAL)
        .await
        .unwrap();
    assert!(!inventory.borrow().is_complete());
    fs::write(&new, BROKEN).unwrap();
    let both = [&start, &new].map(|file| unusable_message(file, "invalid YAML"));
    until(&mut inventory, |inventory| {
        let is_named = |file: &String| inventory.gaps.iter().any(|gap| gap.starts_with(file));
        both.iter().all(is_named)
    })
    .await;
    fs::write(&start, NAMESPACE).unwrap();
    fs::remove_file(&new).unwrap();
    until(&mut inventory, Inventory::is_complete).await;
    assert_eq!(inventory.borrow().namespaces.len(), 1);
}

#[tokio::test]
async fn a_manifest_link_to_procfs_is_refused_and_others_are_read() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("web.yaml"), POD).unwrap();
    let link = dir.path().join("kernel.yaml");
    std::os::unix::fs::symlink("/proc/self/status", &link).unwrap();
    let watched = watch(dir.path().to_owned(), scope(), CHECK_INTERVAL).await;
    let (mut inventory, _reread) = watched.unwrap();
    assert_eq!(inventory.borrow().pods.len(), 1);
    let gap = inventory.borrow().gaps.iter().next().unwrap().clone();
    assert!(
        gap.contains("kernel.yaml") && gap.contains("procfs"),
        "{gap}"
    );
    fs::remove_file(&link).unwrap();
    until(&mut inventory, Inventory::is_complete).await;
}

/// Returns the inventory after a file had the given contents in order.
fn after(texts: &[&str]) -> Inventory {
    let dir = tempfile::tempdir().unwrap();
    let mut directory = Directory {
        path: dir.path().to_owned(),
        scope: scope(),
        files: BTreeMap::new(),
    };
    for text in texts {
        fs::write(dir.path().join("web.yaml"), text).unwrap();
        directory.read().unwrap();
    }
    directory.inventory()
}

#[test]
fn a_file_that_is_emptied_keeps_its_previous_content() {
    for empty in ["", "---\n", "# nothing\n"] {
        let inventory = after(&[POD, empty, empty]);
        assert_eq!((inventory.pods.len(), inventory.is_complete()), (1, true));
    }
    assert!(
        parse("")
            .unwrap_err()
            .contains("remove the file to remove its pods")
    );
}

#[test]
fn a_new_file_that_is_empty_is_without_documents() {
    let inventory = after(&["", ""]);
    assert!(inventory.pods.is_empty() && inventory.is_complete());
    assert_eq!(after(&["", POD]).pods.len(), 1);
}

#[test]
fn a_broken_file_that_is_emptied_is_no_more_known_than_before() {
    assert!(!after(&[BROKEN, "", ""]).is_complete());
    assert!(after(&[BROKEN, "", POD]).is_complete());
}

#[test]
fn a_list_of_nothing_takes_the_pods_away() {
    let inventory = after(&[POD, "kind: List\nitems: []\n"]);
    assert!(inventory.pods.is_empty() && inventory.is_complete());
}

/// Replaces the directory at a path by an empty directory.
type Replace = fn(&Path);

#[tokio::test]
async fn a_directory_that_is_replaced_is_read_and_watched_anew() {
    let moved: Replace = |path| {
        fs::rename(path, path.with_extension("old")).unwrap();
        fs::create_dir(path).unwrap();
    };
    // The new directory may get the same inode number.
    let deleted: Replace = |path| {
        fs::remove_dir_all(path).unwrap();
        fs::create_dir(path).unwrap();
    };
    let swapped: Replace = |path| {
        let (next, link) = (path.with_extension("next"), path.with_extension("link"));
        fs::create_dir(&next).unwrap();
        std::os::unix::fs::symlink(&next, &link).unwrap();
        fs::rename(&link, path).unwrap();
    };
    for (replace, is_link) in [(moved, false), (deleted, false), (swapped, true)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pods");
        if is_link {
            let first = dir.path().join("first");
            fs::create_dir(&first).unwrap();
            std::os::unix::fs::symlink(first, &path).unwrap();
        } else {
            fs::create_dir(&path).unwrap();
        }
        fs::write(path.join("web.yaml"), POD).unwrap();
        let check = Duration::from_millis(10);
        let (mut inventory, _reread) = watch(path.clone(), scope(), check).await.unwrap();
        assert_eq!(inventory.borrow().pods.len(), 1);
        replace(&path);
        until(&mut inventory, |inventory| inventory.pods.is_empty()).await;
        for (count, name) in [(1, "a"), (2, "b")] {
            let text = NAMESPACE.replace("shop", name);
            fs::write(path.join(name).with_extension("yaml"), text).unwrap();
            until(&mut inventory, |inventory| {
                inventory.namespaces.len() == count
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_directory_that_is_missing_is_named() {
    let error = watch("/nonexistent/pods".into(), scope(), CHECK_INTERVAL)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("/nonexistent/pods"), "{error}");
}

#[tokio::test]
async fn of_two_manifests_of_one_pod_the_first_file_holds() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.yaml"), POD).unwrap();
    fs::write(dir.path().join("b.yaml"), POD.replace("u1", "u2")).unwrap();
    let (inventory, _reread) = watch(dir.path().to_owned(), scope(), CHECK_INTERVAL)
        .await
        .unwrap();
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

#[tokio::test]
async fn while_the_directory_is_missing_what_is_known_stays() {
    let dir = tempfile::tempdir().unwrap();
    let [path, away] = ["pods", "away"].map(|name| dir.path().join(name));
    fs::create_dir(&path).unwrap();
    fs::write(path.join("web.yaml"), POD).unwrap();
    let check = Duration::from_millis(10);
    let (mut inventory, reread) = watch(path.clone(), scope(), check).await.unwrap();
    fs::rename(&path, &away).unwrap();
    for _ in 0..3 {
        let (done, read) = oneshot::channel();
        reread.send(done).await.unwrap();
        read.await.unwrap();
        assert_eq!(inventory.borrow().pods.len(), 1);
    }
    // The same directory is back, changed meanwhile.
    fs::remove_file(away.join("web.yaml")).unwrap();
    fs::rename(&away, &path).unwrap();
    until(&mut inventory, |inventory| inventory.pods.is_empty()).await;
}
