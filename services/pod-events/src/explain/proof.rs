//! Lists the facts that prove an enrolled pod's membership, with the evidence of the kernel, of ztunnel and of the pod's
//! manifest.

use std::time::SystemTime;

use inpod_proto::{
    netconfig::v1::FindingKind,
    podevents::v1::{Proof, ProofFact, ProofResult, ZtunnelReport},
};

use super::{PodInfo, ServiceReports, bypass};
use crate::checkpoint::{Intent, Record};

/// The result of a check.
enum Finding {
    Confirmed(String),
    Refuted(String),
    /// The service that knows the fact did not answer.
    Unknown,
}

use Finding::{Confirmed, Refuted, Unknown};

/// Returns no facts for a pod that is not enrolled. Nothing but the rules is known of a pod with a sidecar.
pub(super) fn list(
    known: &PodInfo,
    reports: &ServiceReports,
    ztunnels: &[ZtunnelReport],
    now: SystemTime,
) -> Vec<Proof> {
    let is_enrolled = |record: &&Record| matches!(record.intent, Intent::Enrolled { .. });
    let Some(record) = known.current().filter(is_enrolled) else {
        return Vec::new();
    };
    let evidence = known.view.evidence;
    let acknowledged = ztunnels
        .iter()
        .filter_map(|it| it.acknowledged_at)
        .max_by_key(|at| (at.seconds, at.nanos));
    let rules = to_wire(ProofFact::Rules, rules(reports), evidence.rules, now);
    if record.uses_sidecar() {
        return vec![rules];
    }
    let mut workload = to_wire(ProofFact::Workload, workload(reports, ztunnels), None, now);
    workload.confirmed_at = acknowledged;
    vec![
        rules,
        to_wire(ProofFact::Listeners, listeners(reports), evidence.path, now),
        workload,
        to_wire(
            ProofFact::Connections,
            connections(reports),
            evidence.path,
            now,
        ),
        to_wire(ProofFact::Capabilities, capabilities(known), None, now),
    ]
}

fn to_wire(
    fact: ProofFact,
    finding: Finding,
    confirmed_before: Option<SystemTime>,
    now: SystemTime,
) -> Proof {
    let (result, evidence, confirmed_at) = match finding {
        Confirmed(evidence) => (ProofResult::Confirmed, evidence, Some(now)),
        Refuted(evidence) => (ProofResult::Refuted, evidence, confirmed_before),
        Unknown => {
            let evidence = "The service that knows the fact does not answer.".to_owned();
            (ProofResult::Unknown, evidence, confirmed_before)
        }
    };
    Proof {
        fact: fact.into(),
        result: result.into(),
        evidence,
        confirmed_at: confirmed_at.map(Into::into),
    }
}

fn rules(reports: &ServiceReports) -> Finding {
    let Some(Ok(plan)) = &reports.plan else {
        return Unknown;
    };
    match plan.differences.as_slice() {
        [] => Confirmed("The kernel holds exactly the pod's rules.".to_owned()),
        [first, ..] => Refuted(format!(
            "The kernel's rules differ in {} places: {first}",
            plan.differences.len()
        )),
    }
}

fn listeners(reports: &ServiceReports) -> Finding {
    let kinds = [FindingKind::ListenerTaken, FindingKind::ListenerMissing];
    let confirmed = "Only ztunnel listens on the ports of the rules.";
    by_findings(reports, &kinds, confirmed)
}

fn by_findings(reports: &ServiceReports, refuting: &[FindingKind], confirmed: &str) -> Finding {
    let Some(findings) = reports.findings() else {
        return Unknown;
    };
    let mut findings = findings.iter();
    findings
        .find(|finding| refuting.contains(&finding.kind()))
        .map_or_else(
            || Confirmed(confirmed.to_owned()),
            |finding| Refuted(finding.sentence.clone()),
        )
}

fn workload(reports: &ServiceReports, ztunnels: &[ZtunnelReport]) -> Finding {
    let Some(Ok(_)) = reports.workloads else {
        return Unknown;
    };
    let is_served = |it: &&ZtunnelReport| it.acknowledged_at.is_some() && it.error.is_empty();
    if let Some(report) = ztunnels.iter().find(is_served) {
        return Confirmed(format!(
            "ztunnel has acknowledged the pod (session {}).",
            report.session_id
        ));
    }
    let mut refusals = ztunnels.iter().filter(|it| !it.error.is_empty());
    let why = refusals.next().map_or_else(
        || "No connected ztunnel has acknowledged the pod.".to_owned(),
        |refusal| format!("ztunnel refuses the pod: {}", refusal.error),
    );
    Refuted(why)
}

fn connections(reports: &ServiceReports) -> Finding {
    let Some(Ok(netns)) = &reports.netns else {
        return Unknown;
    };
    if netns.direct_flows > 0 {
        return Refuted(bypass::direct_flows(netns.direct_flows));
    }
    let kinds = [FindingKind::MarkedConnection, FindingKind::MarkingChain];
    let confirmed = "No established connection of the pod bypasses capture.";
    by_findings(reports, &kinds, confirmed)
}

fn capabilities(known: &PodInfo) -> Finding {
    let Some(pod) = known.shown() else {
        return Unknown;
    };
    bypass::describe_mark_setters(&pod.mark_setters).map_or_else(
        || Confirmed("No container may open connections past ztunnel.".to_owned()),
        Refuted,
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use inpod_proto::{netconfig::v1 as netconfig, ztunnelbroker::v1::ListWorkloadsResponse};
    use inpod_types::{Enrollment, Failure, Reason};

    use super::*;
    use crate::{
        explain::tests::running_pod,
        tasks::Evidence,
        testing::{enrolled, record, to_sidecar},
    };

    fn known() -> PodInfo {
        let record = Record {
            intent: enrolled(),
            ..record("c1")
        };
        running_pod(Enrollment::Ambient, vec![record])
    }

    fn answered() -> ServiceReports {
        ServiceReports {
            plan: Some(Ok(netconfig::PlanRulesResponse::default())),
            netns: Some(Ok(netconfig::InspectNetnsResponse::default())),
            workloads: Some(Ok(ListWorkloadsResponse::default())),
        }
    }

    fn away<T>() -> Option<Result<T, Failure>> {
        Some(Err(Failure::new(Reason::DependencyUnavailable, "away")))
    }

    fn ztunnel(error: &str) -> ZtunnelReport {
        ZtunnelReport {
            acknowledged_at: error.is_empty().then(|| SystemTime::UNIX_EPOCH.into()),
            error: error.to_owned(),
            ..ZtunnelReport::default()
        }
    }

    fn results(known: &PodInfo, reports: &ServiceReports, error: &str) -> Vec<ProofResult> {
        let proof = list(known, reports, &[ztunnel(error)], SystemTime::now());
        proof.iter().map(Proof::result).collect()
    }

    fn finding(kind: FindingKind) -> netconfig::Finding {
        netconfig::Finding {
            kind: kind.into(),
            ..netconfig::Finding::default()
        }
    }

    #[test]
    fn every_fact_of_a_healthy_pod_is_confirmed_and_each_can_be_refuted() {
        use ProofResult::{Confirmed, Refuted};
        let of_fact = |at: usize| {
            let mut expected = [Confirmed; 5];
            if let Some(fact) = expected.get_mut(at) {
                *fact = Refuted;
            }
            expected
        };
        assert_eq!(results(&known(), &answered(), ""), of_fact(usize::MAX));
        let differing = netconfig::PlanRulesResponse {
            differences: vec!["a rule is missing".to_owned()],
            ..netconfig::PlanRulesResponse::default()
        };
        let differing = ServiceReports {
            plan: Some(Ok(differing)),
            ..answered()
        };
        assert_eq!(results(&known(), &differing, ""), of_fact(0));
        for (at, kind) in [
            (1, FindingKind::ListenerTaken),
            (1, FindingKind::ListenerMissing),
            (3, FindingKind::MarkedConnection),
            (3, FindingKind::MarkingChain),
        ] {
            let netns = netconfig::InspectNetnsResponse {
                findings: vec![finding(kind)],
                ..netconfig::InspectNetnsResponse::default()
            };
            let reports = ServiceReports {
                netns: Some(Ok(netns)),
                ..answered()
            };
            assert_eq!(results(&known(), &reports, ""), of_fact(at), "{kind:?}");
        }
        assert_eq!(results(&known(), &answered(), "AddrInUse"), of_fact(2));
        let direct = netconfig::InspectNetnsResponse {
            direct_flows: 1,
            ..netconfig::InspectNetnsResponse::default()
        };
        let direct = ServiceReports {
            netns: Some(Ok(direct)),
            ..answered()
        };
        assert_eq!(results(&known(), &direct, ""), of_fact(3));
    }

    #[test]
    fn a_silent_service_leaves_a_fact_unknown_with_its_last_confirmation() {
        let mut known = known();
        let then = SystemTime::UNIX_EPOCH + Duration::from_secs(7);
        known.view.evidence = Evidence {
            rules: Some(then),
            path: None,
        };
        let silent = ServiceReports {
            plan: away(),
            netns: away(),
            workloads: away(),
        };
        let proof = list(&known, &silent, &[], SystemTime::now());
        let facts: Vec<_> = proof
            .iter()
            .map(|it| (it.fact(), it.result(), it.confirmed_at))
            .collect();
        use ProofResult::{Confirmed, Unknown};
        let rules = (ProofFact::Rules, Unknown, Some(then.into()));
        assert_eq!(facts.first(), Some(&rules));
        for fact in [
            ProofFact::Listeners,
            ProofFact::Workload,
            ProofFact::Connections,
        ] {
            assert!(facts.contains(&(fact, Unknown, None)), "{fact:?} {facts:?}");
        }
        let capabilities = facts.last().map(|(fact, result, _)| (*fact, *result));
        assert_eq!(capabilities, Some((ProofFact::Capabilities, Confirmed)));
    }

    #[test]
    fn only_the_rules_of_a_pod_with_a_sidecar_are_proven() {
        let sidecar = Record {
            intent: enrolled(),
            redirection: to_sidecar(),
            ..record("c1")
        };
        let known = running_pod(Enrollment::Sidecar, vec![sidecar]);
        assert_eq!(results(&known, &answered(), ""), [ProofResult::Confirmed]);
        let outside = running_pod(Enrollment::Ambient, vec![record("c1")]);
        assert_eq!(results(&outside, &answered(), ""), []);
    }
}
