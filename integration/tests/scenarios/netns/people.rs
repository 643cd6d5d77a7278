//! `inpod`, the operators' client: its output and errors.

mod conflicts;
mod explain;
mod faults;
mod watch;

use std::process::{Command, Output, Stdio};

use anyhow::ensure;
use integration::{Cgroups, Node, SERVICES, Spec, TIMEOUT, bin, eventually, not_run_alone, run};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::netns::people::explain::explained;

const HEADER: &str = "NAMESPACE NAME STATE DESIRED REASON SINCE NEXT UNHEALTHY";

fn inpod(node: &Node) -> Command {
    let mut command = Command::new(bin("inpod").unwrap());
    command.arg("--run-dir").arg(node.run_dir());
    command.stdin(Stdio::null());
    command
}

fn asked(node: &Node, arguments: &[&str]) -> Output {
    inpod(node).args(arguments).output().unwrap()
}

pub(crate) fn output_of(node: &Node, arguments: &[&str]) -> String {
    let output = asked(node, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns exit code and standard error; standard output must be empty.
fn refused(node: &Node, arguments: &[&str]) -> (i32, String) {
    let output = asked(node, arguments);
    assert!(output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), said)
}

/// One space between columns, ages as `AGE`.
fn columns(table: &str) -> Vec<String> {
    let is_age = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_digit())
            && word.ends_with(['s', 'm', 'h'])
            && !word.contains('.')
    };
    fn word(word: &str, is_age: bool) -> &str {
        if is_age { "AGE" } else { word }
    }
    let line = |line: &str| {
        line.split_whitespace()
            .map(|it| word(it, is_age(it)))
            .collect::<Vec<_>>()
            .join(" ")
    };
    table.lines().map(line).collect()
}

#[test]
fn each_pod_has_a_line_and_only_those_asked_for_are_there() {
    let node = Node::running().unwrap();
    node.pod(Spec::new("inside").ambient()).unwrap();
    node.pod(Spec::new("outside")).unwrap();
    node.write_manifest(&Spec::new("not-started").ambient())
        .unwrap();
    node.until_known(&Spec::new("not-started")).unwrap();
    let inside = "shop inside enrolled ambient LABEL_ON_POD AGE - -";
    let waiting = "shop not-started out ambient LABEL_ON_POD - - -";
    let outside = "shop outside out none NOT_SELECTED AGE - -";
    for (arguments, lines) in [
        (&["pods"][..], &[HEADER, inside, waiting, outside][..]),
        (
            &["pods", "-n", "shop", "--state", "enrolled"],
            &[HEADER, inside],
        ),
        (
            &["pods", "--state", "enrolled", "--state", "out"],
            &[HEADER, inside, waiting, outside],
        ),
        (&["pods", "-n", "bank"], &[HEADER]),
        (&["pods", "--unhealthy"], &[HEADER]),
        (&["pods", "--admitted-unenrolled"], &[HEADER]),
    ] {
        assert_eq!(
            columns(&output_of(&node, arguments)),
            lines,
            "{arguments:?}"
        );
    }
    let all: Value = serde_json::from_str(&output_of(&node, &["pods", "-o", "json"])).unwrap();
    let first = all.pointer("/pods/0").unwrap();
    let keys: Vec<_> = first
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        ["desired", "pod", "reason", "sandbox", "since", "state"]
    );
    for (pointer, value) in [
        ("/pod/namespace", "shop"),
        ("/pod/name", "inside"),
        ("/desired", "ENROLLMENT_AMBIENT"),
        ("/reason", "REASON_LABEL_ON_POD"),
        ("/state", "POD_STATE_ENROLLED"),
        ("/sandbox/networkName", "podnet"),
    ] {
        assert_eq!(first.pointer(pointer).unwrap(), value, "{pointer}");
    }
}

#[test]
fn a_reader_who_has_seen_enough_is_no_error() {
    let node = Node::running().unwrap();
    let script = "\"$0\" --run-dir \"$1\" pods -o json | true; echo ${PIPESTATUS[0]}";
    let program = bin("inpod").unwrap().display().to_string();
    let run_dir = node.run_dir().display().to_string();
    for _ in 0..5 {
        assert_eq!(
            run("bash", &["-c", script, &program, &run_dir]).unwrap(),
            "0\n"
        );
    }
}

// scenario: 5
#[test]
fn a_resync_repairs_drift_without_a_notification_and_is_logged() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.pod(Spec::new("b")).unwrap();
    // The kernel sends no notifications of sysctls.
    pod.exec(&["sysctl", "-qw", "net.ipv4.tcp_migrate_req=0"])
        .unwrap();
    let text = explained(&node, "a");
    for said in [
        "\nBypasses\n  Its rules are not in sync.\n",
        "\nRules\n  not in sync (",
        "\n  pending transaction:\n    ",
        "\nRemedy      Wait: inpod restores the rules by itself.",
    ] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let lines = columns(&output_of(&node, &["resync", "shop/a"]));
    assert_eq!(
        lines,
        [HEADER, "shop a enrolled ambient LABEL_ON_POD AGE - -"]
    );
    // The answer means that everything is in sync.
    let text = explained(&node, "a");
    assert!(
        text.contains("\n  in sync (") && text.contains("repaired rules"),
        "{text}"
    );
    let log = node.tail("pod-events", 2000);
    let audited = |line: &&str| line.contains("An operator calls") && line.contains("/Resync");
    assert_eq!(log.lines().filter(audited).count(), 1, "{log}");
    let all = columns(&output_of(&node, &["resync", "--all"]));
    assert_eq!(all.len(), 3, "{all:?}");
    let (code, said) = refused(&node, &["resync", "shop/nobody"]);
    assert!(code == 1 && said.contains("POD_UNKNOWN"), "{said}");
}

#[test]
fn a_resync_cuts_a_wait_short() {
    let node = Node::new().unwrap();
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))
        .unwrap();
    node.start_ztunnel(&["--fault", "nack-adds"]).unwrap();
    node.ready().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    eventually("the wait is long", TIMEOUT, || {
        let text = explained(&node, "a");
        ensure!(text.contains("\nNext        in "), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
    let before = node.explain(&pod.spec).unwrap().timeline.len();
    output_of(&node, &["resync", "shop/a"]);
    assert!(node.explain(&pod.spec).unwrap().timeline.len() > before);
}

#[test]
fn a_process_of_a_pod_may_neither_resync_nor_read() {
    const UID: &str = "11111111-2222-3333-4444-555555555555";
    let made = Cgroups::new().and_then(|cgroups| Ok((cgroups.pod(UID)?, cgroups)));
    let Ok((cgroup, _cgroups)) = made else {
        // Without its own cgroup no process looks like a pod's.
        return not_run_alone("it cannot make a cgroup");
    };
    let node = Node::new().unwrap();
    for service in SERVICES {
        node.start_for("cgroup:/a/place/where/nobody/is", service)
            .unwrap();
    }
    eventually("they serve", TIMEOUT, || node.api().status()).unwrap();
    let (program, run_dir) = (bin("inpod").unwrap(), node.run_dir());
    for command in ["resync --all", "pods", "pods --watch", "explain shop/a"] {
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec {} --run-dir {} {command}",
            cgroup.display(),
            program.display(),
            run_dir.display()
        );
        let error = run("sh", &["-c", &script]).unwrap_err().to_string();
        assert!(
            error.contains("CALLER_REFUSED") && error.contains("exit status: 1"),
            "{error}"
        );
    }
    // A host process may do both.
    output_of(&node, &["resync", "--all"]);
}

#[test]
fn who_cannot_be_reached_is_named_with_the_socket_and_what_to_do() {
    let node = Node::new().unwrap();
    for arguments in [
        &["pods"][..],
        &["pods", "-w"],
        &["explain", "a/b"],
        &["resync", "--all"],
    ] {
        let (code, said) = refused(&node, arguments);
        assert_eq!(code, 3, "{said}");
        let socket = inpod_service::socket(&node.run_dir(), "pod-events");
        assert!(said.contains(&socket.display().to_string()), "{said}");
        assert!(
            said.contains("No such file or directory") && said.contains("What to do"),
            "{said}"
        );
    }
    let (code, said) = refused(&node, &["pods", "--state", "gone"]);
    assert!(code == 2 && said.contains("out, enrolling"), "{said}");
}

#[test]
fn the_status_tells_of_each_service_and_fails_where_one_is_away() {
    let node = Node::running().unwrap();
    eventually("all are ready", TIMEOUT, || {
        let output = asked(&node, &["status"]);
        let text = String::from_utf8(output.stdout)?;
        ensure!(output.status.success(), "{text}");
        for service in ["pod-events", "netconfig", "ztunnel-broker"] {
            let line = columns(&text)
                .into_iter()
                .find(|line| line.starts_with(service));
            ensure!(line == Some(format!("{service} ready yes - -")), "{text}");
        }
        ensure!(text.contains("pod-events      ztunnel "), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    let output = asked(&node, &["status", "--timeout", "5"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(
        columns(&text)
            .iter()
            .any(|line| line.starts_with("netconfig ready no - cannot reach"))
    );
}
