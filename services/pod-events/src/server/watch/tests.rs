use std::{fs, path::Path, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _};
use inpod_proto::failure_of;
use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use crate::{checkpoint::Record, testing};

type Events =
    std::pin::Pin<Box<dyn Stream<Item = Result<WatchEnrollmentsResponse, Status>> + Send>>;

const AMBIENT: &str = "istio.io/dataplane-mode: ambient";

fn write_pod(directory: &Path, name: &str, uid: &str, labels: &str) {
    let manifest = format!(
        "kind: Pod\nmetadata: {{namespace: shop, name: {name}, uid: {uid}, labels: {{{labels}}}}}\nspec: {{nodeName: node-1, containers: []}}\n"
    );
    // The rename makes the write atomic.
    let path = directory.join(format!("{name}.yaml"));
    fs::write(path.with_extension("tmp"), manifest).unwrap();
    fs::rename(path.with_extension("tmp"), path).unwrap();
}

struct Fixture {
    dir: TempDir,
    shared: Arc<Shared>,
    registry: Registry,
}

impl Fixture {
    async fn new(records: Vec<Record>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_pod(dir.path(), "db", "uid-of-db", "");
        let shared = testing::shared(dir.path()).await;
        let records = records.into_iter();
        let known = records.map(|record| (record.sandbox.clone(), record));
        Self {
            registry: Registry::new(Arc::clone(&shared), known.collect()),
            shared,
            dir,
        }
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
async fn the_state_comes_first_then_each_change_of_the_source() {
    let fixture = Fixture::new(vec![testing::record("c1")]).await;
    let mut events = fixture.watch(Selection::default());
    let state = ["run-1", "uid-of-db None", "uid-of-web None", "complete"];
    assert_eq!(first(&mut events).await, state);
    assert!(events.next().now_or_never().is_none());
    write_pod(fixture.dir.path(), "db", "uid-of-db", AMBIENT);
    assert_eq!(next(&mut events).await, "uid-of-db Ambient");
    write_pod(fixture.dir.path(), "api", "uid-of-api", "");
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
    write_pod(fixture.dir.path(), "api", "uid-of-api", "");
    write_pod(fixture.dir.path(), "db", "uid-of-db", AMBIENT);
    assert_eq!(next(&mut events).await, "uid-of-db Ambient");
}

#[tokio::test]
async fn a_recreated_pod_is_gone_before_its_successor_is_sent() {
    let fixture = Fixture::new(Vec::new()).await;
    let mut events = fixture.watch(Selection::default());
    first(&mut events).await;
    write_pod(fixture.dir.path(), "db", "another", "");
    assert_eq!(next(&mut events).await, "uid-of-db gone");
    assert_eq!(next(&mut events).await, "another None");
}

#[tokio::test]
async fn the_stream_of_a_client_that_reads_nothing_ends() {
    let fixture = Fixture::new(Vec::new()).await;
    let mut events = fixture.watch(Selection::default());
    first(&mut events).await;
    let key = Arc::new(("shop".parse().unwrap(), "db".parse().unwrap()));
    (0..10_000).for_each(|_| fixture.shared.pod_changes.notify(&key));
    let status = events.next().await.unwrap().unwrap_err();
    assert_eq!(failure_of(&status).reason, Reason::Overloaded);
    assert!(events.next().await.is_none());
}
