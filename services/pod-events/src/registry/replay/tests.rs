use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use inpod_types::{NetnsId, NetnsRef};
use tokio::{sync::watch, time::Instant};

use inpod_service::Trace;

use super::*;
use crate::{
    admission::Admission,
    boottime::BootInstant,
    changes::PodChanges,
    checkpoint::{Checkpoint, Intent, Record},
    clients::Clients,
    config::PodsFrom,
    counters::{Counters, Phases},
    drift::Repairs,
    leave_mode::LeaveMode,
    owners::Owners,
    pipeline::{Pipeline, Revisions, Synced},
    source::Source,
    status::StatusReporter,
    task::{AddCall, Shared},
    testing::{capture, record, sandbox},
};

const WEB: &str = "kind: Pod\nmetadata: {namespace: shop, name: web, uid: uid-of-web}\nspec: {nodeName: node-1, containers: []}\n";

/// A registry on a node without other services.
struct Scene {
    _dir: tempfile::TempDir,
    registry: Registry,
    shared: Arc<Shared>,
}

impl Scene {
    async fn new(records: &[Record]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("web.yaml"), WEB).unwrap();
        let checkpoint = Checkpoint::open(&dir.path().join("checkpoint")).unwrap();
        for record in records {
            checkpoint.write(record).unwrap();
        }
        let unreachable = || inpod_service::channel(&dir.path().join("nobody.sock"));
        let known = checkpoint.load().unwrap();
        let shared = Arc::new(Shared {
            owners: Owners::default(),
            admission: Admission::new(config().max_adds),
            counters: Counters::default(),
            source: source(dir.path().to_owned()).await,
            config: config(),
            leave_mode: LeaveMode::default(),
            pipeline: Pipeline {
                clients: Clients::new(unreachable(), unreachable(), capture()),
                checkpoint,
                synced: watch::channel(Synced::default()).1,
                revisions: Revisions::default(),
            },
            status: StatusReporter::disabled(),
            pod_changes: PodChanges::default(),
            repairs: Repairs::default(),
        });
        Self {
            registry: Registry::new(Arc::clone(&shared), known),
            shared,
            _dir: dir,
        }
    }

    /// Returns the checkpointed intents, ordered by container id.
    fn written(&self) -> Vec<(String, Intent)> {
        let records = self.shared.pipeline.checkpoint.records().unwrap();
        let mut written: Vec<_> = records
            .into_iter()
            .map(|record| (record.sandbox.container_id.to_string(), record.intent))
            .collect();
        written.sort_by(|a, b| a.0.cmp(&b.0));
        written
    }

    async fn replay_add(&self, pod: &str, admitted: OfflineAdd) -> ReplayOutcome {
        let key = ("shop".parse().unwrap(), pod.parse().unwrap());
        self.registry.replay_add(&key, admitted).await
    }
}

async fn source(directory: PathBuf) -> Source {
    let mut config = config();
    config.pods_from = PodsFrom::Directory(directory);
    Source::open(&config).await.unwrap()
}

fn config() -> crate::config::Config {
    crate::testing::config(Path::new("/nowhere"))
}

fn admission(container_id: &str, at: BootInstant) -> OfflineAdd {
    let call = AddCall {
        sandbox: sandbox(container_id),
        uid: Some("uid-of-web".parse().unwrap()),
        netns: NetnsRef::from_path("/run/netns/web"),
        addresses: Vec::new(),
        deadline: Instant::now(),
        work_deadline: Instant::now(),
        trace: Trace::default(),
        phases: Phases::default(),
    };
    OfflineAdd { call, at }
}

fn held(container_id: &str) -> Record {
    Record {
        netns_id: Some(NetnsId {
            device: 4,
            inode: 7,
            cookie: 9,
        }),
        intent: Intent::Enrolled {
            fingerprint: "f".to_owned(),
        },
        ..record(container_id)
    }
}

#[tokio::test]
async fn the_end_of_a_sandbox_that_nothing_was_done_to_forgets_it_at_once() {
    let scene = Scene::new(&[record("c1")]).await;
    assert_eq!(
        scene.registry.replay_delete(&sandbox("c1")).await,
        ReplayOutcome::Done
    );
    assert_eq!(
        scene.registry.replay_delete(&sandbox("c1")).await,
        ReplayOutcome::Done
    );
    assert_eq!(scene.written(), []);
}

#[tokio::test]
async fn the_end_of_an_enrolled_sandbox_is_written_down_without_any_other_service() {
    let scene = Scene::new(&[held("c1")]).await;
    assert_eq!(
        scene.registry.replay_delete(&sandbox("c1")).await,
        ReplayOutcome::Done
    );
    let [(_, intent)] = scene.written().try_into().unwrap();
    assert!(matches!(intent, Intent::Deleting { .. }), "{intent:?}");
}

#[tokio::test]
async fn a_pod_that_was_admitted_unenrolled_is_recorded_once_and_its_end_finds_it() {
    let scene = Scene::new(&[]).await;
    for _ in 0..2 {
        let settled = scene
            .replay_add("web", admission("c1", BootInstant::now()))
            .await;
        assert_eq!(settled, ReplayOutcome::Done);
        assert_eq!(scene.written(), [("c1".to_owned(), Intent::Out)]);
    }
    assert_eq!(
        scene.registry.replay_delete(&sandbox("c1")).await,
        ReplayOutcome::Done
    );
    assert_eq!(scene.written(), []);
}

#[tokio::test]
async fn a_pod_that_the_source_does_not_show_is_waited_for_and_then_dropped() {
    let scene = Scene::new(&[]).await;
    let of_another = |at| {
        let mut admitted = admission("c1", at);
        admitted.call.uid = Some("another".parse().unwrap());
        admitted
    };
    for pod in ["web", "db"] {
        let settled = scene.replay_add(pod, of_another(BootInstant::now())).await;
        assert!(matches!(settled, ReplayOutcome::Retry(_)), "{settled:?}");
        let settled = scene.replay_add(pod, of_another(BootInstant::BOOT)).await;
        assert!(matches!(settled, ReplayOutcome::Dropped(_)), "{settled:?}");
    }
    assert_eq!(scene.written(), []);
}

#[tokio::test]
async fn an_admission_does_not_displace_a_later_sandbox_of_its_pod() {
    let scene = Scene::new(&[]).await;
    let now = BootInstant::now();
    let first = scene.replay_add("web", admission("c2", now)).await;
    assert_eq!(first, ReplayOutcome::Done);
    let settled = scene
        .replay_add("web", admission("c1", BootInstant::BOOT))
        .await;
    assert!(matches!(settled, ReplayOutcome::Dropped(_)), "{settled:?}");
    assert_eq!(scene.written(), [("c2".to_owned(), Intent::Out)]);
}

#[tokio::test]
async fn a_sandbox_that_is_still_to_be_forgotten_is_not_recorded_anew() {
    let scene = Scene::new(&[held("c1")]).await;
    scene.registry.replay_delete(&sandbox("c1")).await;
    let settled = scene
        .replay_add("web", admission("c1", BootInstant::now()))
        .await;
    assert!(matches!(settled, ReplayOutcome::Retry(_)), "{settled:?}");
}
