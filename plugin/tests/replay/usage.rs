use std::process::{Command, Stdio};

use crate::{
    node::{Node, Run},
    recorded::Recorded,
};

const VERSION: &str = concat!(
    "inpod-cni ",
    env!("CARGO_PKG_VERSION"),
    "\nCNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n"
);

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_inpod-cni"))
        .env_clear()
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn without_cni_command_the_plugin_prints_its_version_to_stderr_and_succeeds() {
    assert_eq!(run(&[]), (Some(0), String::new(), VERSION.to_owned()));
    let node = Node::new();
    let Run {
        code,
        stdout,
        stderr,
        ..
    } = node.run(&Recorded::number("04").without_var("CNI_COMMAND"));
    assert_eq!(
        (code, stdout.as_str(), stderr.as_str()),
        (Some(0), "", VERSION)
    );
    assert!(node.spooled().is_empty());
}

#[test]
fn version_and_help_are_printed_to_stdout() {
    for argument in ["--version", "-V"] {
        assert_eq!(
            run(&[argument]),
            (Some(0), VERSION.to_owned(), String::new())
        );
    }
    for argument in ["--help", "-h"] {
        let (code, stdout, stderr) = run(&[argument]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        assert!(stdout.starts_with(VERSION), "{stdout}");
        assert!(
            stdout.contains("Usage: inpod-cni [--help | --version]\n"),
            "{stdout}"
        );
        assert!(stdout.lines().all(|line| line.len() <= 80), "{stdout}");
    }
}

#[test]
fn any_other_argument_is_exit_code_2_with_the_usage() {
    let usage = "Usage: inpod-cni [--help | --version]\n".to_owned();
    for arguments in [
        &["--verbose"][..],
        &["ADD"],
        &[""],
        &["--help", "--version"],
        &["--version", "x"],
    ] {
        assert_eq!(
            run(arguments),
            (Some(2), String::new(), usage.clone()),
            "{arguments:?}"
        );
    }
}

#[test]
fn a_runtimes_call_is_served_whatever_its_arguments_are() {
    let output = Command::new(env!("CARGO_BIN_EXE_inpod-cni"))
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .arg("--help")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.stdout.starts_with(b"{\"cniVersion\":\"1.1.0\""));
}
