//! Every check with every sidecar redirection, on pods whose redirection changes.

use netconfig::{
    apply::Phase,
    rules::{InboundCapture, Redirection, Sidecar},
};

use super::{
    checks::{checks, direct},
    mesh::{Mesh, PRIVILEGED, PROXY},
    process::Role,
    settings,
};
use crate::packets::{
    checks::Check,
    matrix::{MAX_PODS, controls, run_all},
    probe::{Dial, Evidence, SILENCE, at_once},
    world::{Place, Pod, pod},
};

type Named = (&'static str, Sidecar);

/// One pod for TPROXY's privileged proxy, one for all others.
#[test]
fn every_redirection_of_a_sidecar_does_what_it_says() {
    let is_tproxied = |(_, settings): &Named| settings.inbound_capture == InboundCapture::Tproxy;
    let (tproxied, others): (Vec<_>, Vec<_>) = settings::all().into_iter().partition(is_tproxied);
    let mut work = Vec::new();
    for kind in Pod::ALL {
        work.push((kind, true, sample(kind, &tproxied)));
        work.push((kind, false, sample(kind, &others)));
    }
    let failures = at_once(MAX_PODS, &work, |(kind, is_tproxied, settings)| {
        let owner = if *is_tproxied { PRIVILEGED } else { PROXY };
        let mut mesh = Mesh::new(*kind, owner, Role::Answers);
        if *is_tproxied {
            mesh.proxy.set_transparent(true);
        }
        try_pod(&mesh, settings)
    });
    let failures: Vec<_> = failures.into_iter().flatten().collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Selects all settings for pods with both families, a part for others.
fn sample(kind: Pod, all: &[Named]) -> Vec<Named> {
    let most = if kind == Pod::Dual { all.len() } else { 2 };
    all.iter().take(most).cloned().collect()
}

/// Before the first redirection, every check must be able to fail; after the last nothing may be captured.
fn try_pod(mesh: &Mesh, all: &[Named]) -> Vec<String> {
    let world = &mesh.world;
    let families = world.families();
    let labelled_failures = |when: &str, failed: Vec<String>| -> Vec<String> {
        let failed = failed.into_iter();
        failed
            .map(|failure| format!("{:?} {when}: {failure}", world.kind))
            .collect()
    };
    let mut every: Vec<Check> = Vec::new();
    for check in all
        .iter()
        .flat_map(|(_, settings)| checks(settings, families))
    {
        if !every.contains(&check) {
            every.push(check);
        }
    }
    let mut failures = labelled_failures("control", controls(world, &direct(families), &every));
    for (name, settings) in all {
        assert!(mesh.apply(settings), "{name}");
        failures.extend(labelled_failures(
            name,
            run_all(world, &checks(settings, families)),
        ));
        let redirection = Redirection::Sidecar(settings.clone());
        let verified = world.writer.verify(&world.pod.netns, &redirection);
        assert_eq!(verified.unwrap().differences, [""; 0], "{name}");
    }
    world.remove(Phase::Final);
    failures.extend(labelled_failures(
        "after",
        run_all(world, &direct(families)),
    ));
    failures
}

#[test]
fn what_was_applied_ten_times_is_there_once() {
    let mesh = Mesh::new(Pod::Dual, PRIVILEGED, Role::Answers);
    let settings = settings::by_tproxy(settings::rich());
    let pod = &mesh.world.pod;
    let shown = || {
        let shown = ["rule", "-6 rule", "-6 addr show dev lo"].map(|what| pod.ip(what));
        shown.concat() + &pod.ip("route show table 10501") + &pod.ip("-6 route show table 10501")
    };
    assert!(mesh.apply(&settings));
    let first = shown();
    assert_eq!(first.matches("lookup 10501").count(), 2, "{first}");
    assert_eq!(first.matches("inet6 ::6/128").count(), 1, "{first}");
    for _ in 0..10 {
        assert!(!mesh.apply(&settings));
        assert!(mesh.apply(&settings::basic()));
        assert!(!shown().contains("10501"));
        assert!(mesh.apply(&settings));
        assert_eq!(shown(), first);
    }
}

/// Returns a sentence for each connection that reaches the pod although TPROXY routes it to a proxy that does
/// not accept foreign destinations.
pub(super) fn admitted_past_a_nontransparent_proxy(mesh: &mut Mesh, ports: &[u16]) -> Vec<String> {
    mesh.proxy.set_transparent(false);
    let mut let_in = Vec::new();
    for family in mesh.world.families() {
        for to in ports {
            let dial = Dial::tcp(Place::Outside, pod(*family), *to);
            let port = mesh.world.port();
            let found = dial.open(&mesh.world, port, SILENCE).1;
            if found != Evidence::Silence {
                let_in.push(format!(
                    "{family}: past a proxy that is nontransparent: {found}"
                ));
            }
        }
    }
    mesh.proxy.set_transparent(true);
    let_in
}

#[test]
fn by_tproxy_nothing_is_let_in_past_a_proxy_that_does_not_take_it() {
    let mut mesh = Mesh::new(Pod::Dual, PRIVILEGED, Role::Answers);
    mesh.proxy.set_transparent(true);
    assert_ne!(
        admitted_past_a_nontransparent_proxy(&mut mesh, &[8080]),
        [""; 0],
        "without rules"
    );
    mesh.apply(&settings::by_tproxy(settings::basic()));
    assert_eq!(
        admitted_past_a_nontransparent_proxy(&mut mesh, &[8080]),
        [""; 0]
    );
}
