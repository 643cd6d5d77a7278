//! `inpod doctor` and `inpod bundle`: doctor names each broken prerequisite and nothing else. One test changes how the
//! mounts of all are propagated.

mod breaks;
mod bundle;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use anyhow::{Context as _, ensure};
use integration::{Node, Spec, TIMEOUT, bin, eventually};
use serde_json::Value;

/// The verdict by code and subject.
type Verdicts = BTreeMap<(String, String), String>;

/// A chain that calls inpod, and the plugin.
struct Host {
    node: Node,
    /// Directories of networks and of plugins.
    conf: PathBuf,
    bin: PathBuf,
}

const CHAIN: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"inpod-cni"}]}"#;

impl Host {
    fn new() -> Self {
        let node = Node::running().unwrap();
        let base = PathBuf::from("/run").join(node.name());
        let (conf, bins) = (base.join("net.d"), base.join("bin"));
        fs::create_dir(&conf).unwrap();
        fs::create_dir(&bins).unwrap();
        fs::write(conf.join("10-podnet.conflist"), CHAIN).unwrap();
        fs::copy(bin("inpod-cni").unwrap(), bins.join("inpod-cni")).unwrap();
        // Only its agent may read a node's state.
        let restricted = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(node.state_dir(), restricted).unwrap();
        Self {
            node,
            conf,
            bin: bins,
        }
    }

    fn inpod(&self, command: &str) -> Command {
        let mut run = Command::new("nsenter");
        run.arg(format!("--net={}", self.node.netns().path().display()));
        run.arg(bin("inpod").unwrap()).arg(command);
        run.arg("--run-dir").arg(self.node.run_dir());
        run.arg("--plugin-state-dir").arg(self.node.state_dir());
        run.arg("--zds-socket").arg(self.node.zds_socket());
        run.arg("--cni-conf-dir").arg(&self.conf);
        run.arg("--cni-bin-dir").arg(&self.bin);
        run
    }

    fn examined(&self, arguments: &[&str]) -> Output {
        self.inpod("doctor").args(arguments).output().unwrap()
    }

    fn report(&self, arguments: &[&str]) -> Value {
        let arguments = [&["-o", "json"], arguments].concat();
        let output = self.examined(&arguments);
        let report: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{output:?}"))
            .unwrap();
        let failed = report["failed"].as_u64().unwrap();
        assert_eq!(
            output.status.code(),
            Some(i32::from(failed > 0)),
            "{output:?}"
        );
        report
    }

    fn verdicts(&self) -> Verdicts {
        verdicts(&self.report(&[]))
    }

    /// Waits for exactly these findings; other checks keep their verdicts or cannot be made.
    fn until_verdicts(&self, before: &Verdicts, wanted: &[(&str, &str, &str)]) {
        eventually(&format!("doctor says {wanted:?}"), TIMEOUT, || {
            let report = self.report(&[]);
            let now = verdicts(&report);
            let new: Vec<_> = now
                .iter()
                .filter(|(key, verdict)| {
                    matches!(verdict.as_str(), "failed" | "warning")
                        && before.get(*key) != Some(*verdict)
                })
                .map(|((code, subject), verdict)| {
                    (code.as_str(), subject.as_str(), verdict.as_str())
                })
                .collect();
            ensure!(new == wanted, "{new:?} in {report:#}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn until_healthy(&self, before: &Verdicts) {
        self.until_verdicts(before, &[]);
    }
}

fn verdicts(report: &Value) -> Verdicts {
    let text = |check: &Value, key: &str| check[key].as_str().unwrap().to_owned();
    let checks = report["checks"].as_array().unwrap();
    let checks = checks
        .iter()
        .map(|it| ((text(it, "code"), text(it, "subject")), text(it, "verdict")));
    checks.collect()
}

#[test]
fn nothing_fails_on_a_node_that_works() {
    let host = Host::new();
    host.node.pod(Spec::new("web").ambient()).unwrap();
    let report = host.report(&["--self-test"]);
    assert_eq!(report["failed"], 0, "{report:#}");
    let found = verdicts(&report);
    for code in [
        "KERNEL_TOO_OLD",
        "NETNS_NOT_SHARED",
        "NETNS_NOT_SEEN",
        "CHAIN_WITHOUT_INPOD",
        "PLUGIN_SILENT",
        "ZDS_SOCKET_FOREIGN",
        "ZTUNNEL_ABSENT",
        "RULES_DRIFTED",
        "SELF_TEST_FAILED",
        "RP_FILTER_STRICT",
        "IPV6_DISABLED",
        "POD_FINDINGS",
        "VERSIONS_DIFFER",
        "SPOOL_WAITING",
        "KILL_SWITCH",
    ] {
        let key = (code.to_owned(), String::new());
        assert_eq!(
            found.get(&key).map(String::as_str),
            Some("ok"),
            "{code}: {report:#}"
        );
    }
    for service in integration::SERVICES {
        for code in [
            "SOCKET_MISSING",
            "SOCKET_OPEN",
            "SERVICE_SILENT",
            "SERVICE_NOT_READY",
        ] {
            let key = (code.to_owned(), service.to_owned());
            assert_eq!(
                found.get(&key).map(String::as_str),
                Some("ok"),
                "{code} {service}: {report:#}"
            );
        }
    }
}

#[test]
fn people_are_told_what_to_do() {
    let host = Host::new();
    fs::remove_file(host.bin.join("inpod-cni")).unwrap();
    let output = host.examined(&[]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, last) = text.rsplit_once("failed  PLUGIN_MISSING: ").unwrap();
    let lines: Vec<_> = last.lines().collect();
    let remedy = "What to do: Check that the installer runs";
    assert!(lines[1].contains(remedy) && lines.len() == 3, "{text}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("failed checks: 1"), "{said}");
}
