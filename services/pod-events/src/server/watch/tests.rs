use std::{collections::BTreeMap, fs, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _};
use inpod_proto::failure_of;
use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use crate::{checkpoint::Record, testing};

type Told = std::pin::Pin<Box<dyn Stream<Item = Result<WatchEnrollmentsResponse, Status>> + Send>>;

struct Scene {
    dir: TempDir,
    shared: Arc<Shared>,
    registry: Registry,
}

impl Scene {
    async fn new(records: Vec<Record>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::show(&dir, "db", "").unwrap();
        let shared = testing::shared(dir.path()).await;
        let known: BTreeMap<_, _> = records
            .into_iter()
            .map(|record| (record.sandbox.clone(), record))
            .collect();
        Self {
            registry: Registry::new(Arc::clone(&shared), known),
            shared,
            dir,
        }
    }

    fn show(dir: &TempDir, name: &str, labels: &str) -> std::io::Result<()> {
        let manifest = format!(
            "kind: Pod\nmetadata: {{namespace: shop, name: {name}, uid: uid-of-{name}, labels: {{{labels}}}}}\nspec: {{nodeName: node-1, containers: []}}\n"
        );
        // Renamed into place, as tools do that care.
        let path = dir.path().join(format!("{name}.yaml"));
        fs::write(path.with_extension("tmp"), manifest)?;
        fs::rename(path.with_extension("tmp"), path)
    }

    fn watch(&self, selection: Selection) -> Told {
        let (shared, registry) = (Arc::clone(&self.shared), self.registry.clone());
        Box::pin(enrollments(shared, registry, "run-1".into(), selection))
    }
}

/// The next thing told, in a word.
async fn next(told: &mut Told) -> String {
    let next = timeout(Duration::from_secs(10), told.next()).await.unwrap();
    match next.unwrap().unwrap().event.unwrap() {
        Event::InstanceId(id) => id,
        Event::Pod(pod) => format!("{} {:?}", pod.pod.clone().unwrap().uid, pod.desired()),
        Event::StateComplete(_) => "complete".into(),
        Event::Gone(pod) => format!("{} gone", pod.uid),
    }
}

async fn first(told: &mut Told) -> Vec<String> {
    let mut all = vec![next(told).await];
    while all.last().unwrap() != "complete" {
        all.push(next(told).await);
    }
    all
}

#[tokio::test]
async fn the_state_comes_first_then_each_change_of_what_the_source_shows() {
    let scene = Scene::new(vec![testing::record("c1")]).await;
    let mut told = scene.watch(Selection::default());
    let state = ["run-1", "uid-of-db None", "uid-of-web None", "complete"];
    assert_eq!(first(&mut told).await, state);
    assert!(told.next().now_or_never().is_none());
    Scene::show(&scene.dir, "db", "istio.io/dataplane-mode: ambient").unwrap();
    assert_eq!(next(&mut told).await, "uid-of-db Ambient");
    Scene::show(&scene.dir, "api", "").unwrap();
    assert_eq!(next(&mut told).await, "uid-of-api None");
    fs::remove_file(scene.dir.path().join("api.yaml")).unwrap();
    assert_eq!(next(&mut told).await, "uid-of-api gone");
}

#[tokio::test]
async fn what_has_not_changed_is_not_told_again() {
    let scene = Scene::new(vec![testing::record("c1")]).await;
    let mut told = scene.watch(Selection::default());
    first(&mut told).await;
    for name in ["web", "db"] {
        let key = ("shop".parse().unwrap(), name.parse().unwrap());
        scene.shared.shown.tell(&key);
    }
    assert!(told.next().now_or_never().is_none());
}

#[tokio::test]
async fn only_what_is_selected_is_told() {
    let scene = Scene::new(vec![testing::record("c1")]).await;
    let by_uid = Selection {
        uid: Some("uid-of-db".parse().unwrap()),
        ..Selection::default()
    };
    let mut told = scene.watch(by_uid);
    assert_eq!(
        first(&mut told).await,
        ["run-1", "uid-of-db None", "complete"]
    );
    Scene::show(&scene.dir, "api", "").unwrap();
    Scene::show(&scene.dir, "db", "istio.io/dataplane-mode: ambient").unwrap();
    assert_eq!(next(&mut told).await, "uid-of-db Ambient");
}

#[tokio::test]
async fn a_pod_that_was_made_anew_is_gone_before_its_successor_is_told() {
    let scene = Scene::new(Vec::new()).await;
    let mut told = scene.watch(Selection::default());
    first(&mut told).await;
    let successor = "kind: Pod\nmetadata: {namespace: shop, name: db, uid: another}\nspec: {nodeName: node-1, containers: []}\n";
    let path = scene.dir.path().join("db.yaml");
    fs::write(path.with_extension("tmp"), successor).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
    assert_eq!(next(&mut told).await, "uid-of-db gone");
    assert_eq!(next(&mut told).await, "another None");
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_told_to_read_again_and_the_stream_ends() {
    let scene = Scene::new(Vec::new()).await;
    let mut told = scene.watch(Selection::default());
    first(&mut told).await;
    let key = ("shop".parse().unwrap(), "db".parse().unwrap());
    (0..10_000).for_each(|_| scene.shared.shown.tell(&key));
    let status = told.next().await.unwrap().unwrap_err();
    assert_eq!(failure_of(&status).reason, Reason::Overloaded);
    assert!(told.next().await.is_none());
}
