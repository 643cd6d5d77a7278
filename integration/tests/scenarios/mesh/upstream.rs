//! Istio's own ambient tests, built from Istio's module by `need_istio_tests` of `integration/setup.sh`. The table in
//! `integration/upstream/README.md` has the other tests, each with the reason why it does not run.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::Context as _;
use integration::kubernetes::{Chain, Image, NodeConfig, ProxyMode};

use crate::{
    cluster::agent::{ExclusiveCluster, SharedCluster},
    mesh::control::{COREDNS, ISTIOD},
};

static CLUSTER: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
    ],
    &[ISTIOD, COREDNS, Image::StockZtunnel, Image::Echo],
    |cluster| {
        // The mesh of Istio's tests has this selector, too.
        let selector = "meshConfig.discoverySelectors[0].matchExpressions[0]";
        cluster.deploy_control_plane(&[
            &format!("{selector}.key=istio.io/test-exclude-namespace"),
            &format!("{selector}.operator=DoesNotExist"),
        ]);
        cluster.deploy_ztunnel("ztunnel");
        let crds = source().join("tests/integration/pilot/testdata/gateway-api-crd.yaml");
        let crds = crds.display().to_string();
        cluster
            .kubectl(&["apply", "--server-side", "-f", &crds])
            .unwrap();
        cluster.make_system();
        cluster.upgrade(&["excludeNamespaces={kube-system,cni-excluded-ns}"]);
        cluster.until_whole();
    },
);

/// The tests of each package, in the order of the packages: `cni` and `untaint` change istiod's root certificate.
const PACKAGES: [(&str, &[&str]); 3] = [
    (
        "ambient",
        &[
            "TestServices",
            "TestPodIP",
            "TestPeerAuthentication",
            "TestAuthorizationL4",
            "TestAPIServer",
            "TestOutboundPolicyAllowAny",
            "TestServiceRestart",
            "TestZtunnelRestart",
            "TestServiceDynamicEnroll",
            "TestBogusUseWaypoint",
            "TestOtherRevisionIgnored",
            "TestServiceEntrySelectsUncapturedPod",
            "TestServiceEntryDNSWithAutoAssign",
            "TestZtunnelConfig",
        ],
    ),
    ("cni", &["TestCNINeverEnrollsPodsInExcludedNamespaces"]),
    ("untaint", &["TestTaintsRemoved"]),
];

fn tests() -> PathBuf {
    let tests = std::env::var_os("ISTIO_TESTS");
    let tests = tests.context("ISTIO_TESTS names no directory: run ./integration/test mesh");
    PathBuf::from(tests.unwrap())
}

/// Returns the directory of Istio's module.
fn source() -> PathBuf {
    tests().join("source")
}

/// Runs tests of a package, and returns those that passed, and all output.
fn run(
    cluster: &ExclusiveCluster<'_>,
    package: &str,
    names: &[&str],
) -> (BTreeSet<String>, String) {
    let ambient = source().join("tests/integration/ambient");
    let (directory, program) = match package {
        "ambient" => (ambient, "ambient.test".to_owned()),
        other => (ambient.join(other), format!("{other}.test")),
    };
    let work = tempfile::tempdir().unwrap();
    let output = cluster
        .server
        .beside(&tests().join(program))
        .current_dir(directory)
        .args(["-test.v", "-test.timeout=15m"])
        .arg(format!("-test.run=^({})$", names.join("|")))
        .args([
            "--istio.test.kube.deploy=false",
            "--istio.test.kube.loadbalancer=false",
            "--istio.test.skipVM",
            "--istio.test.hub=inpod.test",
            "--istio.test.tag=1",
            "--istio.test.pullpolicy=Never",
        ])
        .arg(format!("--istio.test.work_dir={}", work.path().display()))
        .env("REPO_ROOT", source())
        .env("KUBECONFIG", cluster.kubeconfig())
        .env("HOME", work.path())
        .output()
        .unwrap();
    let printed = [&output.stdout[..], &output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    // Tests within a test are indented.
    let verdicts = printed.lines().filter_map(|line| line.strip_prefix("--- "));
    let passed = verdicts.filter_map(|verdict| {
        let (name, took) = verdict.strip_prefix("PASS: ")?.split_once(' ')?;
        eprintln!("{package} {name} passed {took}");
        Some(name.to_owned())
    });
    (passed.collect(), printed)
}

#[test]
fn istios_own_tests_pass() {
    CLUSTER.use_for(|cluster| {
        for (package, names) in PACKAGES {
            let (passed, printed) = run(cluster, package, names);
            let expected: BTreeSet<_> = names.iter().map(|name| (*name).to_owned()).collect();
            if passed != expected {
                eprintln!("{printed}");
            }
            assert_eq!(passed, expected, "{package}");
        }
    });
}
