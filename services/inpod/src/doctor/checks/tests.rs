mod breaks;

use std::{collections::BTreeSet, fs, path::Path};

use super::{
    super::codes::{Code, Verdict},
    fixture::{healthy, healthy_service, network, networks, service},
    *,
};
use breaks::{BREAKS, condition, set};

fn wrong(checks: &[Check]) -> Vec<(Code, Verdict)> {
    let wrong = checks
        .iter()
        .filter(|check| check.verdict >= Verdict::Warning);
    wrong.map(|check| (check.code, check.verdict)).collect()
}

#[test]
fn nothing_is_wrong_with_a_node_as_it_should_be() {
    let checks = run(&healthy());
    let odd: Vec<_> = checks
        .iter()
        .filter(|check| check.verdict != Verdict::Ok)
        .collect();
    assert!(odd.is_empty(), "{odd:#?}");
}

#[test]
fn whatever_breaks_is_told_by_its_code_and_by_no_other() {
    for (code, breaks) in BREAKS {
        let mut facts = healthy();
        breaks(&mut facts);
        let checks = run(&facts);
        assert_eq!(wrong(&checks), [(*code, code.severity())], "{checks:#?}");
        let check = checks
            .iter()
            .find(|check| check.verdict >= Verdict::Warning)
            .unwrap();
        assert!(!check.found.is_empty(), "{check:?}");
    }
}

#[test]
fn every_code_is_reached_and_has_a_remedy() {
    let reached: BTreeSet<_> = BREAKS.iter().map(|(code, _)| *code).collect();
    let all: BTreeSet<_> = Code::ALL.iter().copied().collect();
    assert_eq!(reached, all);
    for code in Code::ALL {
        assert!(
            code.remedy().ends_with('.') && code.meaning().ends_with('.'),
            "{code}"
        );
        assert!(code.severity() >= Verdict::Warning, "{code}");
    }
    let names: BTreeSet<_> = Code::ALL.iter().map(|code| code.name()).collect();
    assert_eq!(names.len(), Code::ALL.len());
}

#[test]
fn what_follows_from_a_service_that_is_away_is_not_told_as_a_failure_of_its_own() {
    let mut facts = healthy();
    let why = || Err("connection refused".to_owned());
    service(&mut facts, "netconfig").ready = why().map(|()| true);
    facts.states = Err("connection refused".to_owned());
    facts.findings = Err("connection refused".to_owned());
    condition(&mut facts, "netconfig");
    condition(&mut facts, "in-step");
    service(&mut facts, "pod-events").ready = Ok(false);
    let checks = run(&facts);
    assert_eq!(wrong(&checks), [(Code::ServiceSilent, Verdict::Failed)]);
    let follows = checks
        .iter()
        .find(|check| check.subject == "pod-events/netconfig")
        .unwrap();
    assert!(
        follows.found.contains("SERVICE_SILENT of netconfig"),
        "{follows:?}"
    );
}

/// A debug pod is a caller that the services refuse.
#[test]
fn a_service_that_refuses_this_process_is_not_said_to_be_silent() {
    let mut facts = healthy();
    for refusing in &mut facts.services {
        refusing.ready = Err("CALLER_REFUSED".to_owned());
        refusing.refuses = true;
    }
    let checks = run(&facts);
    assert_eq!(wrong(&checks), []);
    let unknown = checks
        .iter()
        .filter(|check| check.code == Code::ServiceSilent && check.verdict == Verdict::Unknown);
    assert_eq!(unknown.count(), facts.services.len());
}

fn with_repair() -> Facts {
    let mut facts = healthy();
    let conditions = ["pods", "pod-events"].map(|name| (name.to_owned(), true));
    facts.services.push(super::super::facts::Service {
        conditions: conditions.into(),
        ..healthy_service(20, "repair")
    });
    facts
}

#[test]
fn repair_is_looked_at_where_it_is_and_missed_nowhere() {
    let mut facts = with_repair();
    let checks = run(&facts);
    assert_eq!(wrong(&checks), []);
    let subjects: Vec<_> = checks.iter().map(|it| it.subject.as_str()).collect();
    for subject in ["repair", "repair/pods", "repair/pod-events"] {
        assert!(subjects.contains(&subject), "{subject}");
    }
    // A removed service leaves a socket behind, on which no process listens.
    service(&mut facts, "repair").ready = Err("connection refused".to_owned());
    service(&mut facts, "repair").process = Err("connection refused".to_owned());
    assert_eq!(wrong(&run(&facts)), []);
    service(&mut facts, "repair").socket = Ok(None);
    assert_eq!(wrong(&run(&facts)), []);
    // A service that hangs still has its process.
    let mut facts = with_repair();
    service(&mut facts, "repair").ready = Err("no answer within 5 s".to_owned());
    assert_eq!(
        wrong(&run(&facts)),
        [(Code::ServiceSilent, Verdict::Failed)]
    );
}

#[test]
fn what_repair_says_follows_from_what_is_wrong_with_pod_events() {
    let bad = |facts: &mut Facts, name: &str| {
        let conditions = &mut service(facts, "repair").conditions;
        conditions.insert(name.to_owned(), false);
    };
    let mut alone = with_repair();
    bad(&mut alone, "pods");
    service(&mut alone, "repair").ready = Ok(false);
    let expected = [
        (Code::ServiceNotReady, Verdict::Failed),
        (Code::ConditionBad, Verdict::Failed),
    ];
    assert_eq!(wrong(&run(&alone)), expected);
    // The API server is unreachable for both pod-events and repair.
    condition(&mut alone, "pods");
    assert_eq!(wrong(&run(&alone)), [expected[1]]);
    let mut deaf = with_repair();
    bad(&mut deaf, "pod-events");
    assert_eq!(wrong(&run(&deaf)), [expected[1]]);
    service(&mut deaf, "pod-events").ready = Err("connection refused".to_owned());
    service(&mut deaf, "pod-events").process = Err("connection refused".to_owned());
    let wrong = wrong(&run(&deaf));
    assert!(
        wrong.contains(&(Code::ServiceSilent, Verdict::Failed)),
        "{wrong:?}"
    );
    assert!(!wrong.contains(&expected[1]), "{wrong:?}");
}

#[test]
fn that_no_ztunnel_is_there_is_told_once() {
    let mut facts = healthy();
    facts.workloads.as_mut().unwrap().sessions.clear();
    condition(&mut facts, "ztunnel");
    assert_eq!(
        wrong(&run(&facts)),
        [(Code::ZtunnelAbsent, Verdict::Failed)]
    );
}

#[test]
fn what_cannot_be_looked_at_is_neither_right_nor_wrong() {
    let why = "cannot read it".to_owned();
    let mut facts = healthy();
    facts.release = Err(why.clone());
    facts.mounts = Err(why.clone());
    facts.selinux_enforcing = Err(why.clone());
    facts.apparmor = Err(why.clone());
    facts.chain.networks = Err(why.clone());
    facts.plugin.binary = Err(why.clone());
    facts.kill_switch = Err(why.clone());
    facts.status = Err(why.clone());
    facts.pods = Err(why.clone());
    facts.workloads = Err(why.clone());
    facts.zds.holders = Err(why.clone());
    facts.states = Err(why.clone());
    facts.findings = Err(why.clone());
    facts.spool = Err(why.clone());
    facts.self_test = None;
    facts.directories[0].space = Err(why.clone());
    set(&mut facts, "net/ipv4/conf/all/rp_filter", "odd");
    let checks = run(&facts);
    assert_eq!(wrong(&checks), []);
    let unknown = checks
        .iter()
        .filter(|check| check.verdict == Verdict::Unknown);
    let explained = unknown.filter(|check| !check.found.is_empty()).count();
    assert!(explained >= 16, "{checks:#?}");
}

#[test]
fn a_network_that_multus_hands_out_is_not_judged_by_the_order_of_names() {
    let mut facts = healthy();
    *networks(&mut facts) = vec![
        network("00-multus.conf", &["multus"]),
        network("inpod.conf", &["inpod-cni"]),
    ];
    assert_eq!(wrong(&run(&facts)), []);
}

const MARK: &str =
    "<!-- codes: services/inpod/src/doctor/checks/tests.rs compares this table with the code -->\n";

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to rewrite the page"
)]
fn the_page_lists_every_code() {
    let mut table = "| Code | Verdict | Meaning | What to do |\n|---|---|---|---|\n".to_owned();
    for code in Code::ALL {
        let (verdict, meaning, remedy) = (code.severity().as_str(), code.meaning(), code.remedy());
        table += &format!("| `{code}` | {verdict} | {meaning} | {remedy} |\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARK).unwrap();
    let end = rest.find("\n\n").unwrap() + 1;
    let (written, after) = rest.split_at(end);
    if std::env::var("UPDATE_DOCS").is_ok() {
        fs::write(&path, format!("{before}{MARK}{table}{after}")).unwrap();
        return;
    }
    assert_eq!(written, table, "UPDATE_DOCS=1 cargo test -p inpod the_page");
}
