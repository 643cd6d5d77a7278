//! Changes of settings while a sidecar pod runs.

use anyhow::{Context as _, ensure};
use inpod_proto::{
    podevents::v1::PodState,
    types::v1::{Enrollment, Reason},
};
use inpod_types::keys;
use integration::{Pod, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;

use crate::netns::sidecars::{changed, input, noted, rules, until_redirected, without_ztunnel};

#[test]
fn rules_to_a_sidecar_that_are_flushed_are_repaired() {
    let node = without_ztunnel();
    let pod = node.pod(Spec::new("web").injected()).unwrap();
    pod.exec(&["nft", "flush", "ruleset"]).unwrap();
    eventually("it is repaired", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        ensure!(noted(&known, "repaired rules"), "{:?}", known.timeline);
        ensure!(known.drift.iter().any(|drift| drift.count > 0));
        anyhow::Ok(())
    })
    .unwrap();
    until_redirected(&node, &pod);
    rules(&pod);
}

#[test]
fn an_annotation_on_a_running_pod_changes_its_rules_and_a_malformed_one_does_not() {
    let node = without_ztunnel();
    let mut pod = node.pod(Spec::new("web").injected()).unwrap();
    assert!(rules(&pod).contains("15006"));
    let before = until_redirected(&node, &pod).rules.unwrap().fingerprint;
    changed(&node, &mut pod, |spec| {
        spec.annotated(keys::SIDECAR_INCLUDE_INBOUND_PORTS, "")
    });
    eventually("its rules are others", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        ensure!(noted(&known, "changed rules"), "{:?}", known.timeline);
        ensure!(
            known
                .rules
                .is_some_and(|it| it.differences.is_empty() && it.fingerprint != before)
        );
        anyhow::Ok(())
    })
    .unwrap();
    let stands = rules(&pod);
    changed(&node, &mut pod, |spec| {
        spec.annotated(keys::SIDECAR_INCLUDE_INBOUND_PORTS, "http")
    });
    let refused = eventually("the failure is reported", TIMEOUT, || {
        node.explain(&pod.spec)?.last_failure.context("no failure")
    })
    .unwrap();
    assert_eq!(refused.reason(), Reason::InvalidField);
    assert_eq!(refused.field, keys::SIDECAR_INCLUDE_INBOUND_PORTS);
    assert_eq!(rules(&pod), stands);
    changed(&node, &mut pod, |spec| {
        spec.annotated(keys::SIDECAR_INCLUDE_INBOUND_PORTS, "*")
    });
    eventually("it is as it was", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        ensure!(known.rules.is_some_and(|rules| rules.fingerprint == before));
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn what_is_redirected_stays_so_when_the_mark_goes_or_the_mode_is_switched_off_and_is_repaired() {
    let node = without_ztunnel();
    let mut pod = node.pod(Spec::new("web").injected()).unwrap();
    let before = rules(&pod);
    let stays = |pod: &Pod, reason| {
        let known = eventually("the decision is another", TIMEOUT, || {
            let known = node.explain(&pod.spec)?;
            ensure!(known.reason() == reason, "{known:?}");
            anyhow::Ok(known)
        });
        let known = known.unwrap();
        assert_eq!(known.desired(), Enrollment::None);
        assert!(input(&known, "sandbox is redirected").contains("until the sandbox ends"));
        until_redirected(&node, pod);
    };
    changed(&node, &mut pod, |mut spec| {
        spec.annotations.clear();
        spec
    });
    stays(&pod, Reason::NotSelected);
    assert_eq!(rules(&pod), before);
    changed(&node, &mut pod, |spec| {
        spec.annotated(keys::SIDECAR_STATUS, "{}")
    });
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let off = ["--peer", "uid", "--sidecar-redirection", "false"];
    node.start_with("pod-events", &off).unwrap();
    stays(&pod, Reason::HasSidecar);
    assert_eq!(rules(&pod), before);
    pod.exec(&["nft", "flush", "ruleset"]).unwrap();
    eventually("it is repaired", TIMEOUT, || {
        ensure!(noted(&node.explain(&pod.spec)?, "repaired rules"));
        anyhow::Ok(())
    })
    .unwrap();
    rules(&pod);
    let late = node.pod(Spec::new("late").injected()).unwrap();
    let known = node.explain(&late.spec).unwrap();
    assert_eq!(
        (known.state(), known.reason()),
        (PodState::Out, Reason::HasSidecar)
    );
}
