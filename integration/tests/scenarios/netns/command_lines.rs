//! Every program answers `--help` and `--version` and does nothing else; a wrong command line is exit
//! code 2. Needs no rights.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use cargo_metadata::MetadataCommand;
use integration::bin;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The scripts that are tracked as executable.
fn scripts() -> Vec<PathBuf> {
    let git = Command::new("git")
        .args(["ls-files", "--stage"])
        .current_dir(root())
        .output()
        .unwrap();
    let listed = String::from_utf8(git.stdout).unwrap();
    let executable = listed.lines().filter(|line| line.starts_with("100755"));
    let names = executable.filter_map(|line| line.split('\t').nth(1));
    // The first process inside a machine of the harness.
    let names = names.filter(|name| *name != "integration/src/kubernetes/node.sh");
    names.map(|name| root().join(name)).collect()
}

fn binaries() -> Vec<PathBuf> {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let targets = metadata
        .packages
        .iter()
        .flat_map(|package| &package.targets);
    let names = targets.filter(|target| target.is_bin());
    names.map(|target| bin(&target.name).unwrap()).collect()
}

/// Runs in a foreign directory, with only the environment that scripts need.
fn run(program: &Path, option: &str) -> Output {
    let mut command = Command::new(program);
    command
        .arg(option)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .current_dir("/")
        .stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn every_program_answers_help_and_version_and_refuses_an_unknown_option() {
    let programs: Vec<_> = scripts().into_iter().chain(binaries()).collect();
    assert!(programs.len() > 25, "{programs:?}");
    let mut wrong = Vec::new();
    for program in &programs {
        let name = program.strip_prefix(root()).unwrap_or(program).display();
        let mut expect = |holds: bool, what: &str, output: &Output| {
            if !holds {
                wrong.push(format!("{name}: {what}: {output:?}"));
            }
        };
        let help = run(program, "--help");
        let text = String::from_utf8_lossy(&help.stdout).into_owned();
        expect(
            help.status.success() && !text.is_empty(),
            "--help answers",
            &help,
        );
        let is_narrow = text.lines().all(|line| line.chars().count() <= 80);
        expect(is_narrow, "help fits 80 columns", &help);
        let version = run(program, "--version");
        let lines = String::from_utf8_lossy(&version.stdout).lines().count();
        expect(
            version.status.success() && (1..=2).contains(&lines),
            "--version answers",
            &version,
        );
        let refused = run(program, "--no-such-option");
        expect(
            refused.status.code() == Some(2) && !refused.stderr.is_empty(),
            "a wrong command line is exit code 2",
            &refused,
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A namespace of `deploy/try` whose agent has run. Deletions are written to a file.
const KUBECTL: &str = r#"#!/bin/sh
case "$*" in
  *"get namespace inpod-system "*) printf 'inpod-system inpod-try' ;;
  *"get pods "*) printf 'containerd://1' ;;
  *delete*) echo "$*" >>"$DELETED" ;;
esac
"#;

/// Without helm's hook, rules and plugin would stay on the nodes.
#[test]
fn deploy_try_removes_nothing_while_helm_or_the_cluster_fails() {
    let directory = tempfile::tempdir().unwrap();
    let [kubectl, deleted] = ["kubectl", "deleted"].map(|name| directory.path().join(name));
    fs::write(&kubectl, KUBECTL).unwrap();
    fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
    let remove = |kubectl: &Path, helm: &str| {
        let output = Command::new(root().join("deploy/try"))
            .args(["current", "--context", "x", "--remove"])
            .env("KUBECTL", kubectl)
            .env("HELM", helm)
            .env("DELETED", &deleted)
            .output();
        output.unwrap()
    };
    for (kubectl, helm, cause) in [
        (Path::new("false"), "true", "does not answer"),
        (&*kubectl, "false", "helm cannot list the releases"),
    ] {
        let output = remove(kubectl, helm);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(errors.contains(cause), "{errors}");
        assert!(!deleted.exists(), "{output:?}");
    }
    // The control: helm answers, and the namespace goes.
    assert!(remove(&kubectl, "true").status.success());
    assert!(deleted.exists());
}
