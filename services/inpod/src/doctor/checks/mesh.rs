use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::SelfTestResponse,
    ztunnelbroker::v1::{SessionPhase, WorkloadPhase},
};

use super::super::{
    check::Check,
    codes::Code,
    facts::{Facts, Kind},
};
use crate::display;

const MAX_NAMED: usize = 5;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = ztunnels(facts);
    checks.extend(pods(facts));
    checks.extend(rules(facts));
    checks.push(findings(facts));
    checks
}

pub(super) fn zds(facts: &Facts) -> Vec<Check> {
    let zds = &facts.zds;
    let (missing, foreign) = (Code::ZdsSocketMissing, Code::ZdsSocketForeign);
    let socket = match &zds.socket {
        Err(why) => return vec![Check::unknown(missing, "", why)],
        Ok(None) => {
            return vec![Check::problem(
                missing,
                "",
                format!("{} does not exist", zds.path),
            )];
        }
        Ok(Some(socket)) => socket,
    };
    let mut checks = vec![Check::whether(
        socket.kind != Kind::Socket,
        missing,
        "",
        &zds.path,
    )];
    let broker = facts.service("ztunnel-broker").map(|it| it.process.clone());
    let broker = broker.and_then(Result::ok).map(|process| process.pid);
    checks.push(match (&zds.holders, broker) {
        (Err(why), _) => Check::unknown(foreign, "", why),
        (Ok(_), None) => Check::unknown(foreign, "", "the pid of ztunnel-broker is unknown"),
        (Ok(holders), Some(broker)) => {
            let shown: Vec<_> = holders
                .iter()
                .map(|(pid, command)| format!("{command} (pid {pid})"))
                .collect();
            let ours = holders.iter().any(|(pid, _)| *pid == broker);
            let shown = format!("listening on {}: {}", zds.path, or_none(&shown));
            Check::whether(!ours, foreign, "", shown)
        }
    });
    checks
}

fn or_none(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.join(", ")
}

fn ztunnels(facts: &Facts) -> Vec<Check> {
    let answer = match &facts.workloads {
        Err(why) => return vec![Check::unknown(Code::ZtunnelAbsent, "", why)],
        Ok(answer) => answer,
    };
    let live = answer
        .sessions
        .iter()
        .filter(|it| it.phase() == SessionPhase::Live)
        .count();
    let all = answer.sessions.len();
    let shown = format!("{all} connected, {live} up to date");
    let seeded = if answer.seeded {
        "seeded"
    } else {
        "not seeded"
    };
    let refused: Vec<_> = answer
        .workloads
        .iter()
        .flat_map(|it| &it.states)
        .filter(|it| {
            matches!(
                it.phase(),
                WorkloadPhase::Refused | WorkloadPhase::Quarantined
            )
        })
        .map(|it| it.uid.as_str())
        .collect();
    let of = format!(
        "{} of {} pods: {}",
        refused.len(),
        answer.workloads.len(),
        some(&refused)
    );
    vec![
        Check::whether(all == 0, Code::ZtunnelAbsent, "", &shown),
        Check::whether(all > 0 && live == 0, Code::ZtunnelBehind, "", shown),
        Check::whether(!answer.seeded, Code::BrokerNotSeeded, "", seeded),
        Check::whether(!refused.is_empty(), Code::WorkloadsRefused, "", of),
    ]
}

fn some(names: &[&str]) -> String {
    let mut shown = names
        .iter()
        .take(MAX_NAMED)
        .copied()
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > MAX_NAMED {
        shown += ", ...";
    }
    if shown.is_empty() {
        "none".to_owned()
    } else {
        shown
    }
}

fn pods(facts: &Facts) -> Vec<Check> {
    let pods = match &facts.pods {
        Err(why) => return vec![Check::unknown(Code::PodsUnhealthy, "", why)],
        Ok(pods) => pods,
    };
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for failure in pods.iter().filter_map(|pod| pod.last_failure.as_ref()) {
        *reasons.entry(display::reason(failure.reason)).or_default() += 1;
    }
    let unhealthy: Vec<_> = reasons
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    let unhealthy_shown = if unhealthy.is_empty() {
        format!("none of {} pods has a failure", pods.len())
    } else {
        unhealthy.join(", ")
    };
    let let_through = pods.iter().filter(|pod| pod.let_through).count();
    vec![
        Check::whether(
            !unhealthy.is_empty(),
            Code::PodsUnhealthy,
            "",
            unhealthy_shown,
        ),
        Check::whether(
            let_through > 0,
            Code::PodsAdmittedUnenrolled,
            "",
            format!("{let_through} of {} pods", pods.len()),
        ),
    ]
}

fn rules(facts: &Facts) -> Vec<Check> {
    let states = match &facts.states {
        Err(why) => return vec![Check::unknown(Code::RulesDrifted, "", why)],
        Ok(states) => states,
    };
    let ours: Vec<_> = states
        .iter()
        .filter(|state| !state.fingerprint.is_empty())
        .collect();
    let drifted: Vec<_> = ours
        .iter()
        .filter(|state| !state.intact)
        .filter_map(|state| Some(state.sandbox.as_ref()?.container_id.as_str()))
        .collect();
    vec![Check::whether(
        !drifted.is_empty(),
        Code::RulesDrifted,
        "",
        format!(
            "{} of {} netns with rules: {}",
            drifted.len(),
            ours.len(),
            some(&drifted)
        ),
    )]
}

fn findings(facts: &Facts) -> Check {
    let code = Code::PodFindings;
    let findings = match &facts.findings {
        Err(why) => return Check::unknown(code, "", why),
        Ok(findings) => findings,
    };
    let inspected = findings.inspected;
    if findings.of.is_empty() {
        return Check::ok(code, "", format!("none in {inspected} netns"));
    }
    let mut kinds: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for (_, finding) in &findings.of {
        let name = finding.kind().as_str_name();
        let name = name.strip_prefix("FINDING_KIND_").unwrap_or(name);
        kinds.entry(name).or_insert((0, &finding.sentence)).0 += 1;
    }
    let shown: Vec<_> = kinds
        .iter()
        .map(|(name, (count, sentence))| format!("{count} {name} ({sentence})"))
        .collect();
    Check::problem(
        code,
        "",
        format!("in {inspected} netns: {}", shown.join("; ")),
    )
}

pub(super) fn self_test(facts: &Facts) -> Check {
    let code = Code::SelfTestFailed;
    match &facts.self_test {
        None => Check::unknown(
            code,
            "",
            "not run: pass --self-test to write the rules of a pod in a temporary network namespace (netconfig logs the request)",
        ),
        Some(Err(why)) => Check::unknown(code, "", why),
        Some(Ok(answer)) => Check::whether(!answer.passed, code, "", tested(answer)),
    }
}

fn tested(answer: &SelfTestResponse) -> String {
    let failed = answer.checks.iter().filter(|check| !check.passed);
    let failed: Vec<_> = failed
        .map(|check| format!("{}: {}", check.name, check.evidence))
        .collect();
    if failed.is_empty() {
        return format!("{} checks passed", answer.checks.len());
    }
    failed.join("; ")
}
