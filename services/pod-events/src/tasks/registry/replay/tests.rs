use std::fs;

use inpod_types::NetnsId;

use super::*;
use crate::{
    boottime::BootInstant,
    checkpoint::{Checkpoint, Intent, Record},
    testing::{add_call, enrolled, record, sandbox, shared},
};

const WEB: &str = "kind: Pod\nmetadata: {namespace: shop, name: web, uid: uid-of-web}\nspec: {nodeName: node-1, containers: []}\n";

/// A registry on a node without other services.
struct Scene {
    _dir: tempfile::TempDir,
    registry: Registry,
    checkpoint: Checkpoint,
}

impl Scene {
    async fn new(records: &[Record]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("web.yaml"), WEB).unwrap();
        let shared = shared(dir.path()).await;
        let checkpoint = shared.pipeline.checkpoint.clone();
        for record in records {
            checkpoint.write(record).unwrap();
        }
        let known = checkpoint.load().unwrap();
        Self {
            registry: Registry::new(shared, known),
            checkpoint,
            _dir: dir,
        }
    }

    /// Returns the checkpointed container IDs and intents.
    fn written(&self) -> Vec<(String, Intent)> {
        let records = self.checkpoint.records().unwrap().into_iter();
        let written = |record: Record| (record.sandbox.container_id.to_string(), record.intent);
        records.map(written).collect()
    }

    async fn replay_add(&self, pod: &str, uid: &str, id: &str, at: BootInstant) -> ReplayOutcome {
        let key = ("shop".parse().unwrap(), pod.parse().unwrap());
        let mut call = add_call(id);
        call.uid = Some(uid.parse().unwrap());
        call.netns = record(id).netns;
        self.registry
            .replay_add(&key, OfflineAdd { call, at })
            .await
    }

    async fn assert_delete_is_done(&self) {
        let outcome = self.registry.replay_delete(&sandbox("c1")).await;
        assert_eq!(outcome, ReplayOutcome::Done);
    }
}

fn enrolled_record(container_id: &str) -> Record {
    Record {
        netns_id: Some(NetnsId {
            device: 4,
            inode: 7,
            cookie: 9,
        }),
        intent: enrolled(),
        ..record(container_id)
    }
}

#[tokio::test]
async fn a_replayed_delete_of_an_enrolled_sandbox_is_recorded() {
    let scene = Scene::new(&[enrolled_record("c1")]).await;
    scene.assert_delete_is_done().await;
    let [(_, intent)] = scene.written().try_into().unwrap();
    assert!(matches!(intent, Intent::Deleting { .. }), "{intent:?}");
    // The sandbox is not recorded anew before it is forgotten.
    let now = BootInstant::now();
    let settled = scene.replay_add("web", "uid-of-web", "c1", now).await;
    assert!(matches!(settled, ReplayOutcome::Retry(_)), "{settled:?}");
}

#[tokio::test]
async fn a_pod_admitted_unenrolled_is_recorded_once_until_its_delete() {
    let scene = Scene::new(&[]).await;
    for _ in 0..2 {
        let now = BootInstant::now();
        let settled = scene.replay_add("web", "uid-of-web", "c1", now).await;
        assert_eq!(settled, ReplayOutcome::Done);
        assert_eq!(scene.written(), [("c1".to_owned(), Intent::Out)]);
    }
    for _ in 0..2 {
        scene.assert_delete_is_done().await;
        assert_eq!(scene.written(), []);
    }
}

#[tokio::test]
async fn a_replayed_add_waits_for_the_source_and_is_then_dropped() {
    let scene = Scene::new(&[]).await;
    for pod in ["web", "db"] {
        let now = BootInstant::now();
        let settled = scene.replay_add(pod, "another", "c1", now).await;
        assert!(matches!(settled, ReplayOutcome::Retry(_)), "{settled:?}");
        let boot = BootInstant::BOOT;
        let settled = scene.replay_add(pod, "another", "c1", boot).await;
        assert!(matches!(settled, ReplayOutcome::Dropped(_)), "{settled:?}");
    }
    assert_eq!(scene.written(), []);
}

#[tokio::test]
async fn a_replayed_add_does_not_displace_a_later_sandbox_of_its_pod() {
    let scene = Scene::new(&[]).await;
    let now = BootInstant::now();
    let later = scene.replay_add("web", "uid-of-web", "c2", now).await;
    assert_eq!(later, ReplayOutcome::Done);
    let boot = BootInstant::BOOT;
    let settled = scene.replay_add("web", "uid-of-web", "c1", boot).await;
    assert!(matches!(settled, ReplayOutcome::Dropped(_)), "{settled:?}");
    assert_eq!(scene.written(), [("c2".to_owned(), Intent::Out)]);
}
