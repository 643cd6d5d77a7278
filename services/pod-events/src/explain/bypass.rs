//! Lists a pod's traffic that bypasses ztunnel or its sidecar.

use inpod_proto::podevents::v1::RulesReport;
use inpod_types::{Enrollment, keys};

use super::PodInfo;
use crate::{
    checkpoint::{Intent, Record},
    redirection::Redirection,
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
    ];
    all.extend(observed.into_iter().flatten());
    all
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
            let excluded = settings.exclusions.texts().map(excluded);
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

fn direct_flows(flows: u32) -> String {
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
        testing::{record, sidecar_of},
    };

    fn of(enrollment: Enrollment, records: Vec<Record>, flows: u32) -> Vec<String> {
        let known = running_pod(enrollment, records);
        let rules = RulesReport {
            direct_flows: flows,
            ..RulesReport::default()
        };
        sentences(&known, Some(&rules))
    }

    fn with(intent: Intent) -> Vec<Record> {
        vec![Record {
            intent,
            ..record("c1")
        }]
    }

    fn enrolled() -> Intent {
        let fingerprint = "f".to_owned();
        Intent::Enrolled { fingerprint }
    }

    #[test]
    fn a_pod_that_is_in_sync_bypasses_nothing() {
        let none: Vec<String> = Vec::new();
        assert_eq!(of(Enrollment::Ambient, with(enrolled()), 0), none);
        assert_eq!(of(Enrollment::None, with(Intent::Out), 7), none);
        assert_eq!(of(Enrollment::None, Vec::new(), 0), none);
    }

    #[test]
    fn what_goes_direct_of_a_captured_pod_is_counted() {
        let sentences = of(Enrollment::Ambient, with(enrolled()), 1);
        assert_eq!(sentences, ["1 established connection bypasses ztunnel."]);
        let sentences = of(Enrollment::Ambient, with(enrolled()), 2);
        assert_eq!(sentences, ["2 established connections bypass ztunnel."]);
    }

    #[test]
    fn exclusions_by_sidecar_annotations_are_listed_and_the_built_in_ones_are_not() {
        let of = |annotations: &[(&'static str, &str)]| {
            let records = vec![Record {
                intent: enrolled(),
                redirection: sidecar_of(annotations),
                netns_id: Some(NetnsId {
                    device: 4,
                    inode: 7,
                    cookie: 9,
                }),
                ..record("c1")
            }];
            of(Enrollment::Sidecar, records, 3)
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
    fn a_pod_that_never_ran_bypasses_nothing() {
        let mut known = running_pod(Enrollment::Ambient, Vec::new());
        known.inventory = Arc::default();
        assert!(sentences(&known, None).is_empty());
    }

    #[test]
    fn each_way_around_ztunnel_has_its_sentence() {
        let since = BootInstant::BOOT;
        let admitted_unenrolled = vec![Record {
            admitted_unenrolled: true,
            ..record("c1")
        }];
        let ingress = vec![Record {
            intent: enrolled(),
            redirection: Redirection::Ambient(RequestedSettings {
                bypass_inbound_capture: true,
                ..RequestedSettings::default()
            }),
            ..record("c1")
        }];
        for (enrollment, records, expected) in [
            (
                Enrollment::Unknown,
                admitted_unenrolled,
                "admitted unenrolled",
            ),
            (Enrollment::Ambient, ingress, keys::BYPASS_INBOUND_CAPTURE),
            (
                Enrollment::None,
                with(Intent::Leaving { since }),
                "without HBONE",
            ),
            (
                Enrollment::None,
                with(Intent::Draining { since }),
                "new connections go direct",
            ),
            (Enrollment::Ambient, with(Intent::Enrolling), "not yet"),
            (Enrollment::Ambient, Vec::new(), "has no known sandbox"),
        ] {
            let sentences = of(enrollment, records, 0);
            assert!(
                sentences.len() == 1 && sentences[0].contains(expected),
                "{expected}: {sentences:?}"
            );
        }
    }
}
