//! The table of progress against desired state: the next step of a pod with one sandbox, all services connected.
//! `UPDATE_GOLDEN=1` records the table again, so that a change of the core shows as changed lines.

use std::{fmt::Write as _, path::Path, time::Duration};

use inpod_service::UninstallMode;

use super::{
    describe::describe_next,
    next::{Ending, Wanted, World},
    state::{Phase, Pod, Proxy, Run, Sandbox},
};
use crate::boottime::BootInstant;

fn at(seconds: u64) -> BootInstant {
    BootInstant::after_boot(Duration::from_secs(seconds))
}

const NOW: u64 = 10_000;

/// Returns sandboxes by how far they have come.
fn sandboxes(run: &Run) -> Vec<(&'static str, Sandbox)> {
    let since = at(NOW - 10);
    let bare = |phase| Sandbox {
        phase,
        ..Sandbox::new(1)
    };
    let claimed = |phase| Sandbox {
        claimed_by: Some(Run::clone(run)),
        ..bare(phase)
    };
    let served = |phase| Sandbox {
        served_by: Some(Run::clone(run)),
        ..claimed(phase)
    };
    let unlocated = Sandbox {
        is_located: false,
        ..bare(Phase::Adopted)
    };
    vec![
        ("Out", bare(Phase::Out)),
        ("Enrolling", bare(Phase::Enrolling)),
        ("Enrolling, claimed", claimed(Phase::Enrolling)),
        ("Enrolling, served", served(Phase::Enrolling)),
        ("Adopted, not located", unlocated),
        ("Adopted", bare(Phase::Adopted)),
        ("Adopted, served", served(Phase::Adopted)),
        ("Legacy", claimed(Phase::Legacy)),
        ("ServedLegacy", served(Phase::ServedLegacy)),
        ("Enrolled", served(Phase::Enrolled)),
        ("Enrolled, unclaimed", bare(Phase::Enrolled)),
        ("Announcing", served(Phase::Announcing)),
        ("Leaving", served(Phase::Leaving { since })),
        ("Draining", served(Phase::Draining { since })),
        ("Deleting", served(Phase::Deleting { since })),
    ]
}

fn worlds(run: &Run) -> Vec<(&'static str, World)> {
    let joins = |proxy, is_in_sync| Wanted::In { proxy, is_in_sync };
    let world = |wanted| World {
        now: at(NOW),
        netconfig: Some(Run::clone(run)),
        broker: Some(Run::clone(run)),
        wanted,
        ending: Ending::Agreed,
        is_shown: !matches!(wanted, Wanted::Gone { .. }),
        has_successor: false,
        is_searched: false,
        leave: None,
        is_announced: true,
        listener_check: None,
        propagation: Duration::from_secs(5),
        grace: Duration::from_secs(60),
    };
    let leaving = |leave| World {
        leave: Some(leave),
        ..world(Wanted::Out)
    };
    vec![
        ("in", world(joins(Proxy::Ztunnel, true))),
        ("in, changed", world(joins(Proxy::Ztunnel, false))),
        ("in by a sidecar", world(joins(Proxy::Sidecar, true))),
        ("detached", world(Wanted::Detached)),
        ("out", world(Wanted::Out)),
        ("gone now", world(Wanted::Gone { since: at(NOW) })),
        (
            "gone for an hour",
            world(Wanted::Gone {
                since: at(NOW - 3600),
            }),
        ),
        ("unknown", world(Wanted::Unknown)),
        ("uninstall", leaving(UninstallMode::Uninstall)),
        ("handover", leaving(UninstallMode::Handover)),
    ]
}

#[test]
fn the_next_step_by_progress_and_desired_state_is_as_recorded() {
    let run: Run = "run".into();
    let mut table = String::new();
    for (progress, sandbox) in sandboxes(&run) {
        writeln!(table, "{progress}").unwrap();
        for (wanted, world) in worlds(&run) {
            let pod = Pod {
                sandboxes: vec![sandbox.clone()],
                ..Pod::default()
            };
            let next = describe_next(&pod, &world);
            let next = if next.is_empty() { "-" } else { &next };
            writeln!(table, "  {wanted:<17}{next}").unwrap();
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/pods/table.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &table).unwrap();
    }
    let recorded = std::fs::read_to_string(file).unwrap();
    assert_eq!(
        recorded,
        table,
        "UPDATE_GOLDEN=1 cargo test -p pod-events {}",
        module_path!()
    );
}
