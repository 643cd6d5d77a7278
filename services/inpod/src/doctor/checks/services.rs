//! Checks the sockets, the health and the releases of the services.

use inpod_proto::podevents::v1::Condition;

use super::{
    super::{
        check::Check,
        codes::{Code, Verdict},
        collect::{INSTALLER, OPTIONAL_SERVICES},
        facts::{Facts, Kind, Service},
    },
    openness,
};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks: Vec<Check> = facts.services.iter().flat_map(check_service).collect();
    let conditions = conditions(facts, &checks);
    let cause = cause_for_repair(&checks, &conditions);
    for check in &mut checks {
        match (check.code, check.subject.as_str()) {
            (Code::ConditionBad, "repair/pod-events" | "repair/pods")
            | (Code::ServiceNotReady, "repair")
                if check.verdict == Verdict::Failed =>
            {
                attribute_to(check, cause.as_deref());
            }
            (Code::ServiceNotReady, "pod-events") => attribute_readiness(check, &conditions),
            (Code::ConditionBad, BROKER_ZTUNNEL_CONDITION) if is_without_ztunnel(facts) => {
                let found = format!("caused by {}", Code::ZtunnelAbsent);
                *check = Check::unknown(check.code, BROKER_ZTUNNEL_CONDITION, found);
            }
            _ => {}
        }
    }
    checks.extend(conditions);
    checks.extend(versions(facts));
    checks
}

/// Maps conditions of pod-events to the services on which they report; other checks cover these services.
const CONDITION_SERVICES: [(&str, &[&str]); 4] = [
    ("netconfig", &["netconfig"]),
    ("ztunnel-broker", &["ztunnel-broker"]),
    ("ztunnel", &["ztunnel-broker"]),
    ("in-step", &["netconfig", "ztunnel-broker"]),
];

/// The broker's condition for a connected ztunnel.
const BROKER_ZTUNNEL_CONDITION: &str = "ztunnel-broker/ztunnel";

fn is_without_ztunnel(facts: &Facts) -> bool {
    let workloads = facts.workloads.as_ref();
    workloads.is_ok_and(|it| it.sessions.is_empty())
}

/// Returns the failed check of pod-events, or of its connection to the API server, that explains a similar failure of
/// repair.
fn cause_for_repair(known: &[Check], conditions: &[Check]) -> Option<String> {
    let is_failed = |check: &&Check| check.verdict == Verdict::Failed;
    let of_pod_events = |check: &&Check| check.subject == "pod-events";
    let of_its_pods = |check: &&Check| check.subject == "pod-events/pods";
    let away = known.iter().filter(of_pod_events).find(is_failed);
    let blind = || conditions.iter().filter(of_its_pods).find(is_failed);
    let cause = away.or_else(blind)?;
    Some(format!("{} of {}", cause.code, cause.subject))
}

fn attribute_to(check: &mut Check, cause: Option<&str>) {
    if let Some(cause) = cause {
        let found = format!("{}; caused by {cause}", check.found);
        let subject = check.subject.clone();
        *check = Check::unknown(check.code, &subject, found);
    }
}

/// Reports a service that is not ready as unknown instead of failed if every unmet condition has a known cause.
fn attribute_readiness(check: &mut Check, conditions: &[Check]) {
    let is = |verdict| move |it: &&Check| it.verdict == verdict;
    let is_caused = !conditions.iter().any(|it| is(Verdict::Failed)(&it));
    let cause = conditions
        .iter()
        .find(is(Verdict::Unknown))
        .filter(|_| is_caused);
    if let Some(cause) = cause
        && check.verdict == Verdict::Failed
    {
        let found = format!("{}: {}", check.found, cause.found);
        *check = Check::unknown(check.code, "pod-events", found);
    }
}

fn check_service(service: &Service) -> Vec<Check> {
    let name = service.name;
    let missing = match (&service.directory, &service.socket) {
        (Err(why), _) | (_, Err(why)) => {
            return vec![Check::unknown(Code::SocketMissing, name, why)];
        }
        (Ok(directory), Ok(socket)) => directory.zip(*socket),
    };
    let Some((directory, socket)) = missing else {
        return vec![absent(service)];
    };
    let mut checks = vec![Check::ok(Code::SocketMissing, name, "exists")];
    let open = [
        ("directory", openness(directory, Kind::Directory, 0o700)),
        ("socket", openness(socket, Kind::Socket, 0o600)),
    ];
    let open: Vec<_> = open
        .iter()
        .filter_map(|(what, how)| Some(format!("{what}: {}", how.as_ref()?)))
        .collect();
    checks.push(match open.as_slice() {
        [] => Check::ok(Code::SocketOpen, name, "0700 and 0600"),
        open => Check::problem(Code::SocketOpen, name, open.join("; ")),
    });
    checks.extend(answer(service));
    checks
}

fn absent(service: &Service) -> Check {
    let name = service.name;
    let found = match service.directory {
        Ok(Some(_)) => "the directory exists, but has no socket",
        Ok(None) | Err(_) => "the directory does not exist",
    };
    // The directory of a removed service stays on the node, so the missing socket may be intended.
    if OPTIONAL_SERVICES.contains(&name) {
        return Check::unknown(Code::SocketMissing, name, found);
    }
    if name == INSTALLER && matches!(service.directory, Ok(None)) {
        return Check::problem(Code::InstallerAbsent, name, found);
    }
    Check::problem(Code::SocketMissing, name, found)
}

fn answer(service: &Service) -> Vec<Check> {
    let name = service.name;
    let ready = match &service.ready {
        // The socket of a removed service stays on the node, too.
        Err(why) if OPTIONAL_SERVICES.contains(&name) && service.process.is_err() => {
            let found = format!("{why}: it has stopped, or was removed from this node");
            return vec![Check::unknown(Code::ServiceSilent, name, found)];
        }
        Err(why) if service.refuses => {
            let found = format!("{why}; run inpod on the node itself, outside of any pod");
            return vec![Check::unknown(Code::ServiceSilent, name, found)];
        }
        Err(why) => return vec![Check::problem(Code::ServiceSilent, name, why)],
        Ok(ready) => ready,
    };
    let pid = service.process.as_ref().map_or(0, |process| process.pid);
    let version = service.version.as_deref().unwrap_or("unknown");
    let mut checks = vec![Check::ok(
        Code::ServiceSilent,
        name,
        format!("pid {pid}, version {version}"),
    )];
    let found = if *ready { "ready" } else { "not ready" };
    checks.push(Check::whether(!ready, Code::ServiceNotReady, name, found));
    if name != "pod-events" {
        checks.extend(
            service
                .conditions
                .iter()
                .map(|(condition, ok)| own(name, condition, *ok)),
        );
    }
    checks
}

fn own(service: &str, condition: &str, ok: bool) -> Check {
    let (code, subject) = match condition {
        "apply" => (Code::AddsRefused, service.to_owned()),
        _ => (Code::ConditionBad, format!("{service}/{condition}")),
    };
    let found = if ok {
        "met"
    } else {
        "not met; see the log of the service"
    };
    Check::whether(
        !ok,
        code,
        &subject,
        format!("condition {condition}: {found}"),
    )
}

/// Checks the conditions of pod-events, and attributes an unmet condition to a service that already failed another
/// check.
fn conditions(facts: &Facts, known: &[Check]) -> Vec<Check> {
    match &facts.status {
        Err(why) => vec![Check::unknown(Code::ConditionBad, "pod-events", why)],
        Ok(status) => {
            let conditions = status.conditions.iter();
            conditions
                .map(|condition| condition_of(facts, known, condition))
                .collect()
        }
    }
}

fn condition_of(facts: &Facts, known: &[Check], condition: &Condition) -> Check {
    let (code, subject) = (Code::ConditionBad, format!("pod-events/{}", condition.name));
    if condition.ok {
        return Check::ok(code, &subject, "met");
    }
    if let Some(cause) = cause(facts, known, &condition.name) {
        return Check::unknown(
            code,
            &subject,
            format!("{}; caused by {cause}", condition.message),
        );
    }
    Check::problem(code, &subject, &condition.message)
}

fn cause(facts: &Facts, known: &[Check], condition: &str) -> Option<String> {
    let (_, services) = CONDITION_SERVICES
        .iter()
        .find(|(name, _)| *name == condition)?;
    let failed = known.iter().find(|check| {
        services.contains(&check.subject.as_str()) && check.verdict == Verdict::Failed
    });
    if let Some(failed) = failed {
        return Some(format!("{} of {}", failed.code, failed.subject));
    }
    let is_absent = condition == "ztunnel" && is_without_ztunnel(facts);
    is_absent.then(|| Code::ZtunnelAbsent.to_string())
}

fn versions(facts: &Facts) -> Option<Check> {
    let versions: Vec<_> = facts
        .services
        .iter()
        .filter_map(|service| Some((service.name, service.version.as_deref().ok()?)))
        .collect();
    let shown: Vec<_> = versions
        .iter()
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    let shown = shown.join(", ");
    let releases: Vec<_> = versions
        .iter()
        .filter_map(|(_, version)| release(version))
        .collect();
    let (first, last) = (releases.iter().min()?, releases.iter().max()?);
    // The next major version follows the last minor version of the previous one, whose number is unknown here.
    let is_far = first.0 != last.0 || last.1 - first.1 > 1;
    let differ = versions
        .iter()
        .any(|(_, version)| Some(version) != versions.first().map(|(_, version)| version));
    Some(match (is_far, differ) {
        (true, _) => Check::problem(Code::VersionsTooFar, "", shown),
        (false, differ) => Check::whether(differ, Code::VersionsDiffer, "", shown),
    })
}

fn release(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
