//! Input that no runtime should send.

use std::{
    process::{Command, Stdio},
    time::Instant,
};

use crate::{
    fake_agent::{FakeAgent, Script},
    node::{Node, Run, TIMEOUT},
    recorded::Recorded,
};

fn containerds_add() -> Recorded {
    Recorded::number("04")
}

#[test]
fn a_stdin_that_is_no_configuration_is_refused_and_named() {
    let ten_megabytes = vec![b' '; 10 << 20];
    let cut = &containerds_add().stdin.into_bytes()[..100];
    for (stdin, code) in [
        (&b""[..], 6),
        (b"[]", 6),
        (b"\xff\xfe", 6),
        (cut, 6),
        (&ten_megabytes, 6),
        (b"{}", 7),
        (br#"{"cniVersion":"1.2.0"}"#, 1),
        (br#"{"cniVersion":"9.0.0"}"#, 1),
        (br#"{"cniVersion":"1.0.0","name":7,"type":"x"}"#, 7),
    ] {
        let run = Node::new().run_with(&containerds_add(), stdin);
        assert_eq!(run.error_code(), code, "{run:?}");
        assert_eq!(run.log()["level"], "ERROR");
    }
}

#[test]
fn the_error_has_the_version_of_the_configuration() {
    let call = containerds_add().without_var("CNI_NETNS");
    let run = Node::new().run(&call);
    assert_eq!(
        (run.error_code(), &run.error()["cniVersion"]),
        (4, &"1.0.0".into())
    );
    assert!(run.error()["msg"].as_str().unwrap().contains("CNI_NETNS"));
}

#[test]
fn a_version_after_the_newest_is_error_1_with_the_list_of_versions() {
    let mut call = containerds_add();
    call.stdin = call.stdin.replacen("1.0.0", "1.2.0", 1);
    let error = Node::new().run(&call).error();
    assert_eq!(
        (&error["code"], &error["cniVersion"]),
        (&1.into(), &"1.1.0".into())
    );
    let msg = error["msg"].as_str().unwrap();
    assert!(msg.contains("\"1.2.0\""), "{msg}");
    assert!(
        msg.contains("0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"),
        "{msg}"
    );
}

#[test]
fn a_call_of_an_empty_or_unknown_verb_is_error_4() {
    for verb in ["", "add"] {
        let call = containerds_add().with_var("CNI_COMMAND", verb);
        assert_eq!(Node::new().run(&call).error_code(), 4);
    }
}

#[test]
fn an_add_with_args_that_cannot_be_read_is_error_4_and_the_agent_is_not_asked() {
    let node = Node::new();
    let agent = FakeAgent::on(&node, Script::Accept);
    for args in [
        "nonsense",
        "K8S_POD_NAMESPACE=../etc;K8S_POD_NAME=a",
        "MAC=0a:00",
    ] {
        let run = node.run(&containerds_add().with_var("CNI_ARGS", args));
        assert_eq!(run.error_code(), 4);
        assert!(run.error()["msg"].as_str().unwrap().contains("CNI_ARGS"));
    }
    assert!(agent.questions().is_empty());
}

#[test]
fn a_stdin_that_never_ends_is_error_5() {
    // DEL has the shortest timeout.
    let call = Recorded::number("05");
    let began = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_inpod-cni"))
        .env_clear()
        .envs(&call.env)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let open = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(open);
    let run = Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        took: began.elapsed(),
    };
    assert_eq!(run.error_code(), 5);
    assert!(run.took < TIMEOUT, "{run:?}");
}

#[test]
fn what_is_not_to_be_logged_is_not() {
    let node = Node::new();
    let _agent = FakeAgent::on(&node, Script::Accept);
    let mut call = containerds_add();
    call.stdin = call
        .stdin
        .replace(r#""logLevel":"debug""#, r#""logLevel":"warn""#);
    let run = node.run(&call);
    run.printed(&call.key("prevResult").unwrap());
    assert_eq!(run.stderr, "");
}
