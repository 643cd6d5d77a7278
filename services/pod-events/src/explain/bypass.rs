//! Lists a pod's traffic that bypasses ztunnel or its sidecar.

use inpod_proto::podevents::v1::RulesReport;
use inpod_types::{Enrollment, keys};

use super::PodInfo;
use crate::{
    checkpoint::{Intent, Record},
    pod::MarkSetter,
    redirection::{Redirection, exclusion_texts},
};

const NOT_YET: &str = "It should be in the mesh but is not yet: its traffic may not be captured.";

/// Returns a sentence for each bypass. A pod that is not selected for the mesh has no sentences.
pub(super) fn sentences(known: &PodInfo, rules: Option<&RulesReport>) -> Vec<String> {
    let Some(record) = known.current() else {
        return without_sandbox(known).into_iter().collect();
    };
    if record.admitted_unenrolled {
        let why = "It was admitted unenrolled: none of its traffic is captured.";
        return vec![why.to_owned()];
    }
    let in_place = matches!(
        record.intent,
        Intent::Enrolled { .. } | Intent::Leaving { .. }
    );
    let flows = rules.map_or(0, |rules| rules.direct_flows);
    let differ = rules.is_some_and(|rules| !rules.differences.is_empty());
    let mut all = exclusions(record);
    let observed = [
        intent_sentence(known, record),
        (in_place && differ).then(|| "Its rules are not in sync.".to_owned()),
        // netconfig counts the flows that bypass ztunnel.
        (record.intent.has_effects() && !record.uses_sidecar() && flows > 0)
            .then(|| direct_flows(flows)),
        (in_place && !record.uses_sidecar())
            .then(|| {
                known
                    .shown()
                    .and_then(|pod| describe_mark_setters(&pod.mark_setters))
            })
            .flatten(),
    ];
    all.extend(observed.into_iter().flatten());
    all
}

/// Returns a sentence that names the containers and the origin of each container's right.
pub(super) fn describe_mark_setters(all: &[MarkSetter]) -> Option<String> {
    let join_names = |is_declared: bool| {
        let chosen = all.iter().filter(|it| it.is_declared == is_declared);
        let names: Vec<_> = chosen.map(|it| it.container.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let declared = join_names(true).map(|names| format!("{names} (by securityContext)"));
    let origin = "by the default of containerd and docker, not of CRI-O: drop NET_RAW";
    let by_default = join_names(false).map(|names| format!("{names} ({origin})"));
    let containers: Vec<_> = declared.into_iter().chain(by_default).collect();
    (!containers.is_empty()).then(|| {
        format!(
            "Containers that may connect past ztunnel, as root with NET_RAW or NET_ADMIN: {}.",
            containers.join(", ")
        )
    })
}

/// Returns the requested and permitted exclusions of the pod.
fn exclusions(record: &Record) -> Vec<String> {
    let excluded = |(name, list): (&str, String)| format!("Excluded by {name}: {list}.");
    let limited = |(name, list): (&str, String)| format!("Capture limited by {name} to: {list}.");
    match &record.redirection {
        _ if !record.intent.has_effects() => Vec::new(),
        Redirection::Ambient(settings) => {
            let inbound = keys::BYPASS_INBOUND_CAPTURE;
            let inbound = format!("Its annotation {inbound} exempts inbound connections.");
            let inbound = settings.bypass_inbound_capture.then_some(inbound);
            let kept = "Connections that it had before its enrollment bypass ztunnel.";
            let kept = settings.keep_existing_connections.then(|| kept.to_owned());
            let excluded = exclusion_texts(&settings.exclusions).map(excluded);
            inbound.into_iter().chain(excluded).chain(kept).collect()
        }
        Redirection::Sidecar(sidecar) => {
            let limited = sidecar.limits().map(limited);
            sidecar.exclusions().map(excluded).chain(limited).collect()
        }
    }
}

pub(super) fn is_wanted(known: &PodInfo) -> bool {
    let enrollment = known.decision.enrollment;
    matches!(enrollment, Enrollment::Ambient | Enrollment::Sidecar)
}

/// Returns the sentence for a pod that belongs in the mesh and runs, but has no known sandbox.
fn without_sandbox(known: &PodInfo) -> Option<String> {
    let has_address = known.shown().is_some_and(|pod| !pod.addresses.is_empty());
    let wanted = is_wanted(known) && has_address;
    let why =
        "It should be in the mesh, but has no known sandbox: none of its traffic is captured.";
    wanted.then(|| why.to_owned())
}

fn intent_sentence(known: &PodInfo, record: &Record) -> Option<String> {
    let sentence = match record.intent {
        Intent::Enrolled { .. } if record.is_detached() => {
            "It stays redirected to its sidecar, but inpod no longer maintains the rules."
        }
        Intent::Out | Intent::Enrolling if is_wanted(known) => NOT_YET,
        // Rules that another agent applied for a sidecar are unknown.
        Intent::Adopted if is_wanted(known) && record.redirection.is_sidecar() => NOT_YET,
        Intent::Legacy | Intent::ServedLegacy => {
            "Another agent's rules in iptables' legacy tables decide what is captured; inpod cannot see or replace them."
        }
        Intent::Leaving { .. } => {
            "It is leaving the mesh: peers are switching to connections without HBONE."
        }
        Intent::Draining { .. } => {
            "It is leaving the mesh: new connections go direct, captured ones continue."
        }
        Intent::Out
        | Intent::Enrolling
        | Intent::Adopted
        | Intent::Enrolled { .. }
        | Intent::Announcing
        | Intent::Deleting { .. } => return None,
    };
    Some(sentence.to_owned())
}

pub(super) fn direct_flows(flows: u32) -> String {
    let are = if flows == 1 {
        "connection bypasses"
    } else {
        "connections bypass"
    };
    format!("{flows} established {are} ztunnel.")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use inpod_types::NetnsId;

    use super::*;
    use crate::{
        boottime::BootInstant,
        explain::tests::running_pod,
        redirection::RequestedSettings,
        testing::{enrolled, record, sidecar_of},
    };

    fn of(enrollment: Enrollment, records: Vec<Record>, flows: u32) -> Vec<String> {
        let known = running_pod(enrollment, records);
        let rules = RulesReport {
            direct_flows: flows,
            ..RulesReport::default()
        };
        sentences(&known, Some(&rules))
    }

    fn with(intent: Intent) -> Record {
        Record {
            intent,
            ..record("c1")
        }
    }

    #[test]
    fn a_pod_that_is_in_sync_or_never_ran_bypasses_nothing() {
        for (enrollment, records, flows) in [
            (Enrollment::Ambient, vec![with(enrolled())], 0),
            (Enrollment::None, vec![with(Intent::Out)], 7),
            (Enrollment::None, Vec::new(), 0),
        ] {
            assert_eq!(of(enrollment, records, flows), [""; 0], "{enrollment:?}");
        }
        let mut known = running_pod(Enrollment::Ambient, Vec::new());
        known.inventory = Arc::default();
        assert_eq!(sentences(&known, None), [""; 0]);
    }

    #[test]
    fn direct_connections_of_a_captured_pod_are_counted() {
        for (flows, expected) in [
            (1, "1 established connection bypasses ztunnel."),
            (2, "2 established connections bypass ztunnel."),
        ] {
            let sentences = of(Enrollment::Ambient, vec![with(enrolled())], flows);
            assert_eq!(sentences, [expected]);
        }
    }

    #[test]
    fn containers_that_can_set_the_mark_are_named_with_the_grant() {
        let setter = |container: &str, is_declared| MarkSetter {
            container: container.to_owned(),
            is_declared,
        };
        let prefix = "Containers that may connect past ztunnel, as root with NET_RAW or NET_ADMIN:";
        let declared = "vpn (by securityContext)";
        let default = "a, b (by the default of containerd and docker, not of CRI-O: drop NET_RAW)";
        for (all, expected) in [
            (vec![], None),
            (
                vec![setter("vpn", true)],
                Some(format!("{prefix} {declared}.")),
            ),
            (
                vec![setter("a", false), setter("vpn", true), setter("b", false)],
                Some(format!("{prefix} {declared}, {default}.")),
            ),
        ] {
            assert_eq!(describe_mark_setters(&all), expected);
        }
    }

    #[test]
    fn exclusions_of_sidecars_are_listed_unless_built_in() {
        let of = |annotations: &[(&'static str, &str)]| {
            let redirected = Record {
                redirection: sidecar_of(annotations),
                netns_id: Some(NetnsId {
                    device: 4,
                    inode: 7,
                    cookie: 9,
                }),
                ..with(enrolled())
            };
            of(Enrollment::Sidecar, vec![redirected], 3)
        };
        assert_eq!(of(&[]), [""; 0]);
        let ports = (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, "8080,15020");
        let networks = (keys::SIDECAR_INCLUDE_NETWORKS, "");
        let sentences = of(&[ports, networks]);
        assert_eq!(
            sentences,
            [
                format!("Excluded by {}: 8080.", ports.0),
                format!("Capture limited by {} to: none.", networks.0)
            ]
        );
    }

    #[test]
    fn each_way_around_ztunnel_has_its_sentence() {
        let since = BootInstant::BOOT;
        let admitted_unenrolled = vec![Record {
            admitted_unenrolled: true,
            ..record("c1")
        }];
        let ingress = Record {
            redirection: Redirection::Ambient(RequestedSettings {
                bypass_inbound_capture: true,
                ..RequestedSettings::default()
            }),
            ..with(enrolled())
        };
        let leaving = vec![with(Intent::Leaving { since })];
        let draining = vec![with(Intent::Draining { since })];
        for (enrollment, records, expected) in [
            (
                Enrollment::Unknown,
                admitted_unenrolled,
                "admitted unenrolled",
            ),
            (
                Enrollment::Ambient,
                vec![ingress],
                keys::BYPASS_INBOUND_CAPTURE,
            ),
            (Enrollment::None, leaving, "without HBONE"),
            (Enrollment::None, draining, "new connections go direct"),
            (
                Enrollment::Ambient,
                vec![with(Intent::Enrolling)],
                "not yet",
            ),
            (Enrollment::Ambient, Vec::new(), "has no known sandbox"),
        ] {
            let sentences = of(enrollment, records, 0);
            let [sentence] = &sentences[..] else {
                panic!("{expected}: {sentences:?}");
            };
            assert!(sentence.contains(expected), "{expected}: {sentence}");
        }
    }
}
