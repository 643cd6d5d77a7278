use std::{collections::BTreeMap, fs, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _};
use inpod_proto::failure_of;
use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use crate::{checkpoint::Record, testing};

type Events =
    std::pin::Pin<Box<dyn Stream<Item = Result<WatchEnrollmentsResponse, Status>> + Send>>;

struct Fixture {
    dir: TempDir,
    shared: Arc<Shared>,
    registry: Registry,
}

impl Fixture {
    async fn new(records: Vec<Record>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::write_pod(&dir, "db", "").unwrap();
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

    fn write_pod(dir: &TempDir, name: &str, labels: &str) -> std::io::Result<()> {
        let manifest = format!(
            "kind: Pod\nmetadata: {{namespace: shop, name: {name}, uid: uid-of-{name}, labels: {{{labels}}}}}\nspec: {{nodeName: node-1, containers: []}}\n"
        );
        // The rename makes the write atomic.
        let path = dir.path().join(format!("{name}.yaml"));
        fs::write(path.with_extension("tmp"), manifest)?;
        fs::rename(path.with_extension("tmp"), path)
    }

    fn watch(&self, selection: Selection) -> Events {
        let (shared, registry) = (Arc::clone(&self.shared), self.registry.clone());
        Box::pin(enrollments(shared, registry, "run-1".into(), selection))
    }
}

async fn next(events: &mut Events) -> String {
    let next = timeout(Duration::from_secs(20), events.next())
        .await
        .unwrap();
    match next.unwrap().unwrap().event.unwrap() {
        Event::InstanceId(id) => id,
        Event::Pod(pod) => format!("{} {:?}", pod.pod.clone().unwrap().uid, pod.desired()),
        Event::StateComplete(_) => "complete".into(),
        Event::Gone(pod) => format!("{} gone", pod.uid),
    }
}

async fn first(events: &mut Events) -> Vec<String> {
    let mut all = vec![next(events).await];
    while all.last().unwrap() != "complete" {
        all.push(next(events).await);
    }
    all
}

#[tokio::test]
async fn the_state_comes_first_then_each_change_of_what_the_source_shows() {
    let fixture = Fixture::new(vec![testing::record("c1")]).await;
    let mut events = fixture.watch(Selection::default());
    let state = ["run-1", "uid-of-db None", "uid-of-web None", "complete"];
    assert_eq!(first(&mut events).await, state);
    assert!(events.next().now_or_never().is_none());
    Fixture::write_pod(&fixture.dir, "db", "istio.io/dataplane-mode: ambient").unwrap();
    assert_eq!(next(&mut events).await, "uid-of-db Ambient");
    Fixture::write_pod(&fixture.dir, "api", "").unwrap();
    assert_eq!(next(&mut events).await, "uid-of-api None");
    fs::remove_file(fixture.dir.path().join("api.yaml")).unwrap();
    assert_eq!(next(&mut events).await, "uid-of-api gone");
}

#[tokio::test]
async fn an_unchanged_pod_is_not_sent_again() {
    let fixture = Fixture::new(vec![testing::record("c1")]).await;
    let mut events = fixture.watch(Selection::default());
    first(&mut events).await;
    for name in ["web", "db"] {
        let key = ("shop".parse().unwrap(), name.parse().unwrap());
        fixture.shared.pod_changes.notify(&Arc::new(key));
    }
    assert!(events.next().now_or_never().is_none());
}

#[tokio::test]
async fn only_selected_pods_are_sent() {
    let fixture = Fixture::new(vec![testing::record("c1")]).await;
    let by_uid = Selection {
        uid: Some("uid-of-db".parse().unwrap()),
        ..Selection::default()
    };
    let mut events = fixture.watch(by_uid);
    assert_eq!(
        first(&mut events).await,
        ["run-1", "uid-of-db None", "complete"]
    );
    Fixture::write_pod(&fixture.dir, "api", "").unwrap();
    Fixture::write_pod(&fixture.dir, "db", "istio.io/dataplane-mode: ambient").unwrap();
    assert_eq!(next(&mut events).await, "uid-of-db Ambient");
}

#[tokio::test]
async fn a_recreated_pod_is_gone_before_its_successor_is_sent() {
    let fixture = Fixture::new(Vec::new()).await;
    let mut events = fixture.watch(Selection::default());
    first(&mut events).await;
    let successor = "kind: Pod\nmetadata: {namespace: shop, name: db, uid: another}\nspec: {nodeName: node-1, containers: []}\n";
    let path = fixture.dir.path().join("db.yaml");
    fs::write(path.with_extension("tmp"), successor).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
    assert_eq!(next(&mut events).await, "uid-of-db gone");
    assert_eq!(next(&mut events).await, "another None");
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_asked_to_read_again_and_the_stream_ends() {
    let fixture = Fixture::new(Vec::new()).await;
    let mut events = fixture.watch(Selection::default());
    first(&mut events).await;
    let key = Arc::new(("shop".parse().unwrap(), "db".parse().unwrap()));
    (0..10_000).for_each(|_| fixture.shared.pod_changes.notify(&key));
    let status = events.next().await.unwrap().unwrap_err();
    assert_eq!(failure_of(&status).reason, Reason::Overloaded);
    assert!(events.next().await.is_none());
}
