use serde_json::json;

use super::*;

fn checked(key: &str, text: &str) -> Result<(), InjectError> {
    check(&json!({"metadata": {"annotations": {(key): text}}}))
}

#[test]
fn valid_annotations_are_accepted() {
    for (key, text) in [
        (keys::INTERCEPTION_MODE, "NONE"),
        (keys::STATUS_PORT, "0"),
        (keys::READINESS_PERIOD, "4294967295"),
        (keys::SIDECAR_INCLUDE_NETWORKS, "*"),
        (keys::SIDECAR_INCLUDE_NETWORKS, ""),
        (keys::SIDECAR_EXCLUDE_NETWORKS, "10.0.0.0/8,fd00::/8"),
        (keys::SIDECAR_INCLUDE_INBOUND_PORTS, "*"),
        (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, "80, 443"),
        (keys::SIDECAR_EXCLUDE_INTERFACES, "net1"),
        (keys::REWRITE_PROBES, "True"),
        (keys::NATIVE_SIDECAR, "false"),
        (keys::PROXY_CONFIG, "concurrency: 2"),
        (keys::PROXY_CONFIG, ""),
        (keys::PROXY_CPU, "100m"),
        (keys::PROXY_CPU_LIMIT, ".5"),
        (keys::PROXY_MEMORY, "1e3"),
        (keys::PROXY_MEMORY_LIMIT, "1.5Gi"),
        (keys::AGENT_LOG_LEVEL, "default:info,dns:debug"),
    ] {
        checked(key, text).unwrap();
    }
}

#[test]
fn what_it_may_not_is_refused_by_its_name() {
    for (key, text) in [
        (keys::INTERCEPTION_MODE, "redirect"),
        (keys::STATUS_PORT, "65536"),
        (keys::STATUS_PORT, "-1"),
        (keys::STATUS_PORT, "http"),
        (keys::READINESS_DELAY, "4294967296"),
        (keys::READINESS_FAILURES, "+3"),
        (keys::SIDECAR_INCLUDE_NETWORKS, "10.0.0.0"),
        (keys::SIDECAR_EXCLUDE_NETWORKS, "*"),
        (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, "*"),
        (keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, "*"),
        (keys::SIDECAR_INCLUDE_OUTBOUND_PORTS, "x"),
        (keys::SIDECAR_KUBEVIRT_INTERFACES, "net1;reboot"),
        (keys::REROUTE_VIRTUAL_INTERFACES, "a b"),
        (keys::REWRITE_PROBES, "yes"),
        (keys::NATIVE_SIDECAR, "TRUE"),
        (keys::PROXY_CONFIG, "- a"),
        (keys::PROXY_CONFIG, "a: ["),
        (keys::PROXY_CPU, "-1"),
        (keys::PROXY_CPU, "1 Gi"),
        (keys::PROXY_MEMORY, "128Mi\ncontainers:"),
        (keys::PROXY_MEMORY_LIMIT, ""),
        (keys::PROXY_IMAGE, "a b"),
        (keys::PROXY_IMAGE_TYPE, "debug\"\n"),
        (keys::LOG_LEVEL, "debug --config-yaml x"),
        (keys::COMPONENT_LOG_LEVEL, "a:b\nc"),
    ] {
        let message = checked(key, text).unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("annotation {key}: ")),
            "{message}"
        );
    }
}

#[test]
fn a_huge_annotation_leads_to_a_short_message() {
    let huge = "9".repeat(256 * 1024);
    for (key, _) in CHECKS {
        let Err(error) = checked(key, &huge) else {
            continue;
        };
        let message = error.to_string();
        assert!(message.len() < 500, "{key}: {}", message.len());
    }
}

#[test]
fn every_annotation_that_is_checked_is_in_the_table() {
    let page = include_str!("../../../../../deploy/docs/labels.md");
    let known = |name| page.contains(&format!("\n| `{name}` |"));
    assert!(CHECKS.iter().all(|(name, _)| known(*name)));
}
