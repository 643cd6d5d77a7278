//! The reports of the other services on a pod.

use inpod_proto::{
    netconfig::v1::{Finding, InspectNetnsResponse, PlanRulesResponse},
    podevents::v1 as wire,
    ztunnelbroker::v1::ListWorkloadsResponse,
};
use inpod_types::Failure;

use crate::{checkpoint::Record, clients::ztunnels};

/// The answers of the services; `None` for a service that was not asked.
#[derive(Debug, Default)]
pub(crate) struct ServiceReports {
    pub(crate) plan: Option<Result<PlanRulesResponse, Failure>>,
    pub(crate) netns: Option<Result<InspectNetnsResponse, Failure>>,
    pub(crate) workloads: Option<Result<ListWorkloadsResponse, Failure>>,
}

impl ServiceReports {
    /// Returns the findings of netconfig; `None` if netconfig was not asked or did not answer.
    pub(super) fn findings(&self) -> Option<&[Finding]> {
        let netns = self.netns.as_ref()?.as_ref().ok()?;
        Some(&netns.findings)
    }

    pub(super) fn unavailable(&self) -> Vec<String> {
        fn describe<T>(question: &str, answer: &Option<Result<T, Failure>>) -> Option<String> {
            let failure = answer.as_ref()?.as_ref().err()?;
            Some(format!("{question}: {failure}"))
        }
        let questions = [
            describe("netconfig: the rules", &self.plan),
            describe("netconfig: the contents of the netns", &self.netns),
            describe("ztunnel-broker: the ztunnels", &self.workloads),
        ];
        questions.into_iter().flatten().collect()
    }

    pub(super) fn ztunnels(&self, record: Option<&Record>) -> Vec<wire::ZtunnelReport> {
        match (&self.workloads, record) {
            (Some(Ok(all)), Some(record)) => ztunnels(all, record),
            (_, _) => Vec::new(),
        }
    }

    pub(super) fn rules(self) -> Option<wire::RulesReport> {
        let plan = self.plan.and_then(Result::ok);
        let netns = self.netns.and_then(Result::ok);
        if plan.is_none() && netns.is_none() {
            return None;
        }
        let (plan, netns) = (plan.unwrap_or_default(), netns.unwrap_or_default());
        Some(wire::RulesReport {
            fingerprint: plan.fingerprint,
            differences: plan.differences,
            transaction: plan.transaction,
            listening_ports: netns.listening_ports,
            captured_flows: netns.captured_flows,
            direct_flows: netns.direct_flows,
            uncaptured_udp_flows: netns.uncaptured_udp_flows,
            findings: netns.findings.iter().map(format_finding).collect(),
        })
    }
}

fn format_finding(finding: &Finding) -> String {
    format!("{}: {}", finding.subject, finding.sentence)
}

#[cfg(test)]
mod tests {
    use inpod_types::Reason;

    use super::*;

    fn unavailable<T>() -> Option<Result<T, Failure>> {
        let failure = Failure::new(Reason::DependencyUnavailable, "cannot reach it");
        Some(Err(failure))
    }

    #[test]
    fn an_answer_that_fails_hides_no_other() {
        let nothing_asked = ServiceReports::default();
        assert!(nothing_asked.unavailable().is_empty());
        assert_eq!(nothing_asked.rules(), None);
        let reports = ServiceReports {
            plan: unavailable(),
            netns: Some(Ok(InspectNetnsResponse {
                direct_flows: 2,
                uncaptured_udp_flows: 42,
                ..InspectNetnsResponse::default()
            })),
            workloads: unavailable(),
        };
        let expected = [
            "netconfig: the rules: cannot reach it [DEPENDENCY_UNAVAILABLE]",
            "ztunnel-broker: the ztunnels: cannot reach it [DEPENDENCY_UNAVAILABLE]",
        ];
        assert_eq!(reports.unavailable(), expected);
        let rules = reports.rules().unwrap();
        assert_eq!((rules.direct_flows, rules.uncaptured_udp_flows), (2, 42));
        let reports = ServiceReports {
            plan: Some(Ok(PlanRulesResponse {
                fingerprint: "f".into(),
                ..PlanRulesResponse::default()
            })),
            netns: unavailable(),
            workloads: None,
        };
        assert_eq!(reports.unavailable().len(), 1);
        assert_eq!(reports.rules().unwrap().fingerprint, "f");
    }
}
