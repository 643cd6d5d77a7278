use std::fs;

use inpod_cni::{
    args::NamedPod,
    enrolled::DISABLED_FILE,
    spool::{Cause, Entry, SpooledVerb},
};
use inpod_types::NetnsRef;

use super::*;
use crate::testing::{sandbox, shared};

/// A pod admitted unenrolled just now that the source does not show yet.
fn unenrolled_admission() -> Entry {
    Entry {
        pod: Some(NamedPod {
            namespace: "shop".parse().unwrap(),
            name: "web".parse().unwrap(),
            uid: None,
        }),
        netns: Some(NetnsRef::from_path("/run/netns/a")),
        ..Entry::new(SpooledVerb::Add, Cause::Disabled, sandbox("a"))
    }
}

#[tokio::test]
async fn pods_that_the_kill_switch_admitted_wait_for_its_removal_and_for_no_other_change() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("plugin");
    unenrolled_admission().write(&state_dir).unwrap();
    fs::write(state_dir.join(DISABLED_FILE), "").unwrap();
    let shared = shared(dir.path()).await;
    let registry = Registry::new(Arc::clone(&shared), [].into());
    let mut families = prometheus_client::registry::Registry::default();
    let mut replay = Replay {
        metrics: &Metrics::register(&mut families, &registry, &shared),
        registry: &registry,
        state_dir: &state_dir,
        touched: BTreeSet::new(),
        needs_retry: false,
    };
    let (directory, boot_id) = (state_dir.join(SPOOL_DIR), boot_id());
    spool::replay(&directory, &boot_id, &mut replay)
        .await
        .unwrap();
    assert!(!replay.needs_retry);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    fs::remove_file(state_dir.join(DISABLED_FILE)).unwrap();
    spool::replay(&directory, &boot_id, &mut replay)
        .await
        .unwrap();
    assert!(replay.needs_retry);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
}
