//! What of a pod's traffic goes past ztunnel or its sidecar, or why none of it goes there although it should.

use inpod_proto::podevents::v1::RulesReport;
use inpod_types::{Enrollment, keys};

use super::Known;
use crate::{
    checkpoint::{Intent, Record},
    redirection::{Redirection, Sidecar},
};

/// A sentence each. What keeps a pod out by decision is its reason, and no bypass.
pub(super) fn sentences(known: &Known, rules: Option<&RulesReport>) -> Vec<String> {
    let Some(record) = known.current() else {
        return missing(known).into_iter().collect();
    };
    if record.admitted_unenrolled {
        let why = "It was let through without a decision: none of its traffic is captured.";
        return vec![why.to_owned()];
    }
    let in_place = matches!(
        record.intent,
        Intent::Enrolled { .. } | Intent::Leaving { .. }
    );
    let flows = rules.map_or(0, |rules| rules.direct_flows);
    let differ = rules.is_some_and(|rules| !rules.differences.is_empty());
    let mut all = granted(record);
    let seen = [
        standing(known, record),
        (in_place && differ).then(|| "Its rules are not the ones that belong there.".to_owned()),
        // netconfig counts what goes past ztunnel.
        (record.intent.has_effects() && !record.uses_sidecar() && flows > 0).then(|| direct(flows)),
    ];
    all.extend(seen.into_iter().flatten());
    all
}

/// What the pod asked for and was given.
fn granted(record: &Record) -> Vec<String> {
    if !record.intent.has_effects() {
        return Vec::new();
    }
    let wishes = match &record.redirection {
        Redirection::Ambient(wishes) => wishes,
        Redirection::Sidecar(sidecar) => return kept_from(sidecar),
    };
    let excluded = wishes.exclusions.texts();
    let excluded = excluded.map(|(name, list)| format!("Excluded by {name}: {list}."));
    let kept = "Connections from before its enrollment go on past ztunnel.";
    let kept = wishes.keep_existing_connections.then(|| kept.to_owned());
    let inbound = wishes.bypass_inbound_capture.then(inbound);
    inbound.into_iter().chain(excluded).chain(kept).collect()
}

/// What the pod's annotations keep from its sidecar.
fn kept_from(sidecar: &Sidecar) -> Vec<String> {
    let excluded = sidecar.exclusions();
    let excluded = excluded.map(|(name, list)| format!("Excluded by {name}: {list}."));
    let limited = sidecar.limits();
    let limited = limited.map(|(name, list)| format!("Only what {name} says is captured: {list}."));
    excluded.chain(limited).collect()
}

fn is_wanted(known: &Known) -> bool {
    let enrollment = known.decision.enrollment;
    matches!(enrollment, Enrollment::Ambient | Enrollment::Sidecar)
}

/// A pod that should be in the mesh and of which no sandbox is known.
fn missing(known: &Known) -> Option<String> {
    let wanted = is_wanted(known);
    let why =
        "It should be in the mesh, and no sandbox of it is known: none of its traffic is captured.";
    wanted.then(|| why.to_owned())
}

fn standing(known: &Known, record: &Record) -> Option<String> {
    let wanted = is_wanted(known);
    // What another agent has put in place for a sidecar is not known.
    let is_found = matches!(record.intent, Intent::Adopted) && record.redirection.is_sidecar();
    let sentence = match record.intent {
        Intent::Enrolled { .. } if record.is_detached() => {
            "It stays redirected to its sidecar, and nobody looks after that."
        }
        Intent::Adopted if is_found && wanted => {
            "It should be in the mesh and is not yet: its traffic may not be captured."
        }
        Intent::Out | Intent::Enrolling if wanted => {
            "It should be in the mesh and is not yet: its traffic may not be captured."
        }
        Intent::Leaving { .. } => {
            "It leaves the mesh: its peers are told to send to it without HBONE."
        }
        Intent::Draining { .. } => {
            "It leaves the mesh: new connections go direct, captured ones live on."
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

fn inbound() -> String {
    let key = keys::BYPASS_INBOUND_CAPTURE;
    format!("Its annotation {key} leaves inbound connections alone.")
}

fn direct(flows: u32) -> String {
    let are = if flows == 1 {
        "connection goes"
    } else {
        "connections go"
    };
    format!("{flows} established {are} past ztunnel.")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use inpod_types::{NetnsId, Reason};

    use super::*;
    use crate::{
        boottime::BootInstant,
        decide::Decision,
        redirection::RequestedSettings,
        source::Inventory,
        task::View,
        testing::{pod, record, sidecar_of},
    };

    fn of(enrollment: Enrollment, records: Vec<Record>, flows: u32) -> Vec<String> {
        let pod = pod("shop", "web").pod;
        let known = Known {
            key: (pod.namespace.clone(), pod.name.clone()),
            pod,
            decision: Decision {
                enrollment,
                reason: Reason::NotSelected,
                inputs: Vec::new(),
            },
            view: View {
                records,
                ..View::default()
            },
            inventory: Arc::new(Inventory::default()),
        };
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
    fn a_pod_that_is_where_it_belongs_bypasses_nothing() {
        let none: Vec<String> = Vec::new();
        assert_eq!(of(Enrollment::Ambient, with(enrolled()), 0), none);
        assert_eq!(of(Enrollment::None, with(Intent::Out), 7), none);
        assert_eq!(of(Enrollment::None, Vec::new(), 0), none);
    }

    #[test]
    fn what_goes_direct_of_a_captured_pod_is_counted() {
        let told = of(Enrollment::Ambient, with(enrolled()), 1);
        assert_eq!(told, ["1 established connection goes past ztunnel."]);
        let told = of(Enrollment::Ambient, with(enrolled()), 2);
        assert_eq!(told, ["2 established connections go past ztunnel."]);
    }

    #[test]
    fn what_annotations_keep_from_a_sidecar_is_told_and_what_is_always_kept_is_not() {
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
        let told = of(&[ports, networks]);
        assert_eq!(
            told,
            [
                format!("Excluded by {}: 8080.", ports.0),
                format!("Only what {} says is captured: none.", networks.0)
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
        let ingress = vec![Record {
            intent: enrolled(),
            redirection: Redirection::Ambient(RequestedSettings {
                bypass_inbound_capture: true,
                ..RequestedSettings::default()
            }),
            ..record("c1")
        }];
        for (enrollment, records, said) in [
            (Enrollment::Unknown, admitted_unenrolled, "let through"),
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
            (Enrollment::Ambient, Vec::new(), "no sandbox of it is known"),
        ] {
            let told = of(enrollment, records, 0);
            assert!(
                told.len() == 1 && told[0].contains(said),
                "{said}: {told:?}"
            );
        }
    }
}
