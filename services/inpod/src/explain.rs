//! `inpod explain`: prints everything that pod-events knows about a pod, and network policies without the port of HBONE.

mod policies;

use std::{fmt::Write as _, time::SystemTime};

use inpod_proto::{
    podevents::v1::{ExplainPodRequest, ExplainPodResponse, PodState, RulesReport},
    types::v1::{Enrollment, NetnsId},
};
use inpod_service::escape_controls;

use crate::{
    arguments::ExplainOptions,
    display,
    error::CommandError,
    json,
    node::{Node, PodEvents},
    objects,
    out::Out,
    print_error,
    table::Table,
    time,
};

pub(crate) async fn run(
    node: &Node,
    options: &ExplainOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let request = ExplainPodRequest {
        pod: Some(options.selector()),
    };
    let answer = node.ask(request, PodEvents::explain_pod).await?;
    let policies = closing_policies(options, &answer);
    let sentences = policies.as_deref().unwrap_or_default();
    match json::structured(options.output.format, &answer, "ExplainPodResponse")? {
        Some(json) => {
            out.print_line(&json)?;
            // The JSON is the response of pod-events, without network policies.
            for sentence in sentences {
                print_error(&format!("inpod: {}\n", escape_controls(sentence)));
            }
        }
        None => out.print_text(&text(&answer, sentences, SystemTime::now()))?,
    }
    policies.map(drop)
}

/// Reads the file of `--network-policies`, and returns a sentence about each policy without the port of HBONE. Only pods
/// in ambient mode are reached by HBONE.
fn closing_policies(
    options: &ExplainOptions,
    known: &ExplainPodResponse,
) -> Result<Vec<String>, CommandError> {
    let Some(path) = &options.network_policies else {
        return Ok(Vec::new());
    };
    let pod = known.pod.clone().unwrap_or_default();
    let closing = objects::read(path).and_then(|objects| policies::closing(&objects, &pod));
    let closing = closing.map_err(|cause| CommandError::Objects {
        missing: "network policies are not checked",
        path: path.clone(),
        cause,
    })?;
    let is_enrolled = known.state() == PodState::Enrolled && known.desired() == Enrollment::Ambient;
    Ok(if is_enrolled { closing } else { Vec::new() })
}

/// Renders the facts that have a value, followed by the lists that have entries.
fn text(known: &ExplainPodResponse, policies: &[String], now: SystemTime) -> String {
    let mut text = String::new();
    for (name, value) in facts(known, now) {
        if !value.is_empty() {
            writeln!(text, "{name:12}{}", escape_controls(&value)).unwrap_or_default();
        }
    }
    let lists = [
        ("Network policies", policies.to_vec()),
        ("Bypasses", known.bypasses.clone()),
        ("Proof", proof(known, now)),
        ("Unavailable", known.unavailable.clone()),
        (
            "Rules",
            known.rules.as_ref().map(format_rules).unwrap_or_default(),
        ),
        ("Ztunnels", ztunnels(known, now)),
        ("Drift", drift(known)),
        ("Inputs", inputs(known)),
        ("Timeline", timeline(known, now)),
    ];
    for (name, lines) in lists.iter().filter(|(_, lines)| !lines.is_empty()) {
        writeln!(text, "\n{name}").unwrap_or_default();
        for line in lines {
            writeln!(text, "  {}", escape_controls(line)).unwrap_or_default();
        }
    }
    text
}

fn facts(known: &ExplainPodResponse, now: SystemTime) -> [(&'static str, String); 13] {
    let pod = known.pod.clone().unwrap_or_default();
    let desired = display::format_enrollment(known.desired());
    let sandbox = known.sandbox.as_ref().map(|sandbox| {
        let (network, container) = (&sandbox.network_name, &sandbox.container_id);
        format!("{network}/{container}/{}", sandbox.ifname)
    });
    [
        ("Pod", format!("{}/{}", pod.namespace, pod.name)),
        ("UID", pod.uid),
        ("State", display::format_state(known.state()).to_owned()),
        (
            "Desired",
            format!("{desired} ({})", display::reason(known.reason)),
        ),
        ("Failure", failure(known)),
        ("Waiting", waiting(known, now)),
        ("Remedy", known.remedy.clone()),
        ("Next", next(known, now)),
        ("Annotation", annotation(known)),
        ("Condition", condition(known)),
        ("Sandbox", sandbox.unwrap_or_default()),
        ("Netns", netns(&known.netns_path, known.netns.as_ref())),
        ("Addresses", known.addresses.join(", ")),
    ]
}

fn failure(known: &ExplainPodResponse) -> String {
    let Some(failure) = &known.last_failure else {
        return String::new();
    };
    let mut text = format!("{}: {}", display::reason(failure.reason), failure.message);
    if !failure.field.is_empty() {
        write!(text, " (field {})", failure.field).unwrap_or_default();
    }
    for left in &failure.undo_failures {
        write!(text, "; not rolled back: {left}").unwrap_or_default();
    }
    text
}

fn waiting(known: &ExplainPodResponse, now: SystemTime) -> String {
    let Some(wait) = &known.waiting else {
        return String::new();
    };
    let (since, until) = (time::age(wait.since, now), time::ahead(wait.until, now));
    format!("for {} since {since} (gives up {until})", wait.waits_for)
}

fn next(known: &ExplainPodResponse, now: SystemTime) -> String {
    let when = time::ahead(known.next_attempt_at, now);
    if known.next_step.is_empty() {
        return when;
    }
    format!("{when}: {}", known.next_step)
}

fn annotation(known: &ExplainPodResponse) -> String {
    compare(&known.redirection_annotation, &known.shown_annotation)
}

/// Returns the condition, unless the pod neither has nor needs a condition.
fn condition(known: &ExplainPodResponse) -> String {
    let (expected, shown) = (&known.condition, &known.shown_condition);
    if expected.is_empty() && shown.is_empty() {
        return String::new();
    }
    format!("inpod.io/InMesh {}", compare(expected, shown))
}

fn compare(expected: &str, shown: &str) -> String {
    let or = |text: &str, empty: &str| if text.is_empty() { empty } else { text }.to_owned();
    if expected == shown {
        return or(shown, "none");
    }
    let (shown, expected) = (or(shown, "missing"), or(expected, "none"));
    format!("{shown} (expected: {expected})")
}

fn netns(path: &str, id: Option<&NetnsId>) -> String {
    let Some(id) = id else {
        return path.to_owned();
    };
    let NetnsId {
        device,
        inode,
        cookie,
    } = id;
    format!("{path} (device {device}, inode {inode}, cookie {cookie})")
}

fn format_rules(rules: &RulesReport) -> Vec<String> {
    let mut lines = Vec::new();
    match (rules.fingerprint.as_str(), rules.differences.is_empty()) {
        ("", _) => {}
        (fingerprint, true) => lines.push(format!("in sync ({fingerprint})")),
        (fingerprint, false) => lines.push(format!("not in sync ({fingerprint}):")),
    }
    lines.extend(rules.differences.iter().map(|it| format!("  {it}")));
    if !rules.transaction.is_empty() {
        lines.push("pending transaction:".to_owned());
        lines.extend(rules.transaction.lines().map(|line| format!("  {line}")));
    }
    let ports: Vec<_> = rules.listening_ports.iter().map(u32::to_string).collect();
    let ports = if ports.is_empty() {
        "nothing".to_owned()
    } else {
        ports.join(", ")
    };
    lines.push(format!("listening: {ports}"));
    let (captured, direct) = (rules.captured_flows, rules.direct_flows);
    lines.push(format!("connections: {captured} captured, {direct} direct"));
    if rules.uncaptured_udp_flows > 0 {
        let flows = rules.uncaptured_udp_flows;
        lines.push(format!(
            "UDP flows past capture: {flows} (ztunnel carries TCP only)"
        ));
    }
    lines.extend(rules.findings.iter().map(|it| format!("finding: {it}")));
    lines
}

fn ztunnels(known: &ExplainPodResponse, now: SystemTime) -> Vec<String> {
    let rows = known.ztunnels.iter().map(|it| {
        vec![
            it.session_id.to_string(),
            it.state.clone(),
            time::age(it.acknowledged_at, now),
            it.error.clone(),
        ]
    });
    columns(&["SESSION", "STATE", "ACKNOWLEDGED", "ERROR"], rows)
}

fn proof(known: &ExplainPodResponse, now: SystemTime) -> Vec<String> {
    let rows = known.proof.iter().map(|it| {
        vec![
            display::format_fact(it.fact()).to_owned(),
            display::format_result(it.result()).to_owned(),
            time::age(it.confirmed_at, now),
            it.evidence.clone(),
        ]
    });
    columns(&["FACT", "RESULT", "CONFIRMED", "EVIDENCE"], rows)
}

fn drift(known: &ExplainPodResponse) -> Vec<String> {
    let kinds = known.drift.iter();
    kinds
        .map(|it| format!("{} {}", it.count, it.kind))
        .collect()
}

fn inputs(known: &ExplainPodResponse) -> Vec<String> {
    let rows = known.inputs.iter();
    let rows = rows.map(|it| vec![it.name.clone(), it.value.clone()]);
    columns(&["INPUT", "VALUE"], rows)
}

fn timeline(known: &ExplainPodResponse, now: SystemTime) -> Vec<String> {
    let rows = known
        .timeline
        .iter()
        .map(|it| vec![time::age(it.at, now), time::took(it.took), it.event.clone()]);
    columns(&["AGO", "TOOK", "EVENT"], rows)
}

/// Renders a table as lines; without rows, the header is omitted, too.
fn columns(header: &[&str], rows: impl ExactSizeIterator<Item = Vec<String>>) -> Vec<String> {
    if rows.len() == 0 {
        return Vec::new();
    }
    let mut table = Table::new(header);
    rows.for_each(|row| table.push(row));
    table.take().lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_past_capture_is_shown_if_any_was_counted() {
        let lines = |uncaptured_udp_flows| {
            format_rules(&RulesReport {
                uncaptured_udp_flows,
                ..RulesReport::default()
            })
        };
        let shown = "UDP flows past capture: 42 (ztunnel carries TCP only)";
        assert!(lines(42).iter().any(|line| line == shown));
        let is_shown = |line: &String| line.contains("UDP");
        assert!(!lines(0).iter().any(is_shown));
    }
}
