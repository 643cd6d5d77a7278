use std::fs;

use inpod_cni::{
    enrolled::DISABLED_FILE,
    spool::{Cause, Entry, Netns, Pod, SpooledVerb},
};

use super::*;
use crate::testing::{sandbox, shared};

/// A pod that was let through just now, and that the source does not show yet.
fn let_through() -> Entry {
    Entry {
        pod: Some(Pod {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: None,
        }),
        netns: Some(Netns {
            path: "/run/netns/a".into(),
            device: None,
            inode: None,
        }),
        ..Entry::new(SpooledVerb::Add, Cause::Disabled, &sandbox("a"))
    }
}

#[tokio::test]
async fn what_the_kill_switch_let_through_waits_for_its_end_and_for_nothing_that_changes_before() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("plugin");
    let_through().write(&state_dir).unwrap();
    fs::write(state_dir.join(DISABLED_FILE), "").unwrap();
    let shared = shared(dir.path()).await;
    let registry = Registry::new(Arc::clone(&shared), [].into());
    let mut families = prometheus_client::registry::Registry::default();
    let mut late = Late {
        metrics: &Metrics::register(&mut families, &registry, &shared),
        registry: &registry,
        state_dir: &state_dir,
        touched: BTreeSet::new(),
        waits: false,
    };
    let (directory, boot_id) = (state_dir.join(SPOOL_DIR), boot_id());
    spool::settle(&directory, &boot_id, &mut late)
        .await
        .unwrap();
    assert!(!late.waits);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    fs::remove_file(state_dir.join(DISABLED_FILE)).unwrap();
    spool::settle(&directory, &boot_id, &mut late)
        .await
        .unwrap();
    assert!(late.waits);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
}
