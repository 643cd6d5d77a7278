//! The self-test reports successes and failures. Needs root.

use std::{net::IpAddr, process::Command};

use inpod_proto::netconfig::v1::SelfTestRequest;
use netconfig::{apply::Writer, selftest};

use crate::drift;

fn sources() -> Vec<IpAddr> {
    let sources = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];
    sources.map(|source| source.parse().unwrap()).into()
}

#[test]
fn on_a_machine_that_can_redirect_every_check_passes() {
    let report = selftest::run(&Writer::default(), &sources()).unwrap();
    for check in &report.checks {
        assert!(check.outcome.is_ok(), "{check}");
    }
    let names: Vec<_> = report
        .checks
        .iter()
        .map(|check| check.name.as_str())
        .collect();
    for family in ["IPv4", "IPv6"] {
        for name in [
            "outbound",
            "inbound",
            "DNS over UDP",
            "DNS over TCP",
            "host probe",
        ] {
            assert!(
                names.contains(&format!("{name} {family}").as_str()),
                "{names:?}"
            );
        }
    }
}

/// The self-test listens on the DNS port, and the chart does not grant CAP_NET_BIND_SERVICE.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_charts_capabilities_suffice_for_every_check() {
    let mut netconfig = drift::start(&[]).await;
    let response = netconfig.client.self_test(SelfTestRequest {}).await;
    let checks = response.unwrap().into_inner().checks;
    assert!(checks.len() > 10, "{checks:?}");
    assert!(checks.iter().all(|check| check.passed), "{checks:?}");
}

fn fails_after(program: &'static str, arguments: &str) -> Vec<String> {
    let interfere = |pod: &inpod_linux::Netns| {
        let mut command = Command::new(program);
        command.args(arguments.split(' '));
        let status = pod.within(move || command.status()).unwrap().unwrap();
        assert!(status.success(), "{program} {arguments}");
    };
    let report = selftest::run_after(&Writer::default(), &sources(), interfere).unwrap();
    let failed = report
        .checks
        .into_iter()
        .filter(|check| check.outcome.is_err());
    failed.map(|check| check.name).collect()
}

#[test]
fn what_does_not_work_is_named_and_nothing_else() {
    for (program, arguments, named) in [
        (
            "nft",
            "flush chain inet inpod-nat prerouting",
            &["inbound IPv4", "inbound IPv6"][..],
        ),
        ("ip", "rule del pref 500", &["reply to ztunnel IPv4"]),
        (
            "ip",
            "-6 route del local default dev lo table 10500",
            &["reply to ztunnel IPv6"],
        ),
        (
            "nft",
            "flush chain inet inpod-mangle output",
            &["reply to ztunnel IPv4", "reply to ztunnel IPv6"],
        ),
        (
            "nft",
            "flush chain inet inpod-mangle input",
            &["only ztunnel answers IPv4", "only ztunnel answers IPv6"],
        ),
    ] {
        assert_eq!(
            fails_after(program, arguments),
            named,
            "{program} {arguments}"
        );
    }
}

#[test]
fn where_nothing_is_captured_everything_that_should_be_is_named() {
    let failed = fails_after("nft", "flush ruleset");
    for name in [
        "outbound IPv4",
        "inbound IPv6",
        "DNS over UDP IPv4",
        "DNS over TCP IPv6",
    ] {
        assert!(failed.iter().any(|failed| failed == name), "{failed:?}");
    }
    assert!(
        !failed.iter().any(|name| name == "pod to itself IPv4"),
        "{failed:?}"
    );
}
