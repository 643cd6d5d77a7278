//! Processes of a pod fill its netns with objects, which must cost neither netconfig nor other pods much.

use std::{fmt::Write as _, fs, io::Write as _};

use inpod_proto::netconfig::v1::{ApplyRulesRequest, VerifyRulesRequest};
use inpod_types::Reason;
use tonic::Code;

use crate::{
    harness::{Netconfig, ambient, pod_netns, refusal, wire},
    support::Fresh,
};

/// The limit of netconfig's memory in KiB. netconfig would exceed the limit by reading the objects of a test.
const MAX_PEAK: u64 = 64 << 10;

/// The longest name, which makes messages large.
fn long_name() -> String {
    "n".repeat(255)
}

fn run_script(fresh: &Fresh, script: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(script.as_bytes()).unwrap();
    fresh.command("nft", &["-f", file.path().to_str().unwrap()]);
}

/// Returns commands that add rules of many expressions to a chain of family inet.
fn rules(chain: &str, count: usize, expressions: usize) -> String {
    let rule = format!("add rule inet {chain} {}\n", "counter ".repeat(expressions));
    rule.repeat(count)
}

fn peak_memory(netconfig: &Netconfig) -> u64 {
    let status = format!("/proc/{}/status", netconfig.process.id());
    let text = fs::read_to_string(status).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

fn request(name: &str) -> ApplyRulesRequest {
    ApplyRulesRequest {
        sandbox: wire(name),
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    }
}

#[tokio::test]
async fn a_large_table_of_the_pods_own_is_not_read() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    run_script(
        &fresh,
        &format!(
            "add table inet theirs\nadd chain inet theirs c\n{}",
            rules("theirs c", 20_000, 48)
        ),
    );
    netconfig.claim("c1", &fresh).await.unwrap();
    netconfig.client.apply_rules(request("c1")).await.unwrap();
    assert_eq!(netconfig.differences("c1").await, [""; 0]);
    let peak = peak_memory(&netconfig);
    assert!(peak < MAX_PEAK, "{peak} KiB");
}

#[tokio::test]
async fn a_crowded_table_of_inpods_is_replaced_unread() {
    let mut netconfig = Netconfig::start().await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    netconfig.client.apply_rules(request("c1")).await.unwrap();
    let before = fresh.command("nft", &["-s", "list", "ruleset"]);
    // Too many rules, and few rules of too many bytes.
    for (count, expressions) in [(20_000, 48), (4_000, 120)] {
        run_script(&fresh, &rules("inpod-nat output", count, expressions));
        let differences = netconfig.differences("c1").await.join("; ");
        assert!(
            differences.starts_with("table inpod-nat holds"),
            "{differences}"
        );
        netconfig.client.apply_rules(request("c1")).await.unwrap();
        assert_eq!(fresh.command("nft", &["-s", "list", "ruleset"]), before);
    }
    let peak = peak_memory(&netconfig);
    assert!(peak < MAX_PEAK, "{peak} KiB");
}

#[tokio::test]
async fn a_netns_with_too_many_chains_is_refused_by_name_and_other_pods_join() {
    let mut netconfig = Netconfig::start().await;
    let (crowded, other) = (pod_netns(), pod_netns());
    let table = long_name();
    let mut script = format!("add table inet {table}\n");
    for number in 0..36_000 {
        writeln!(script, "add chain inet {table} {number:n>255}").unwrap();
    }
    run_script(&crowded, &script);
    netconfig.claim("c1", &crowded).await.unwrap();
    let refused = netconfig.client.apply_rules(request("c1")).await;
    let unreadable = (Code::FailedPrecondition, Reason::RulesUnreadable);
    let refused = refused.unwrap_err();
    assert_eq!(refusal(&refused), unreadable);
    assert!(
        refused.message().contains("cannot read the chains"),
        "{refused}"
    );
    let verify = VerifyRulesRequest {
        sandbox: wire("c1"),
        redirection: ambient(),
    };
    let refused = netconfig.client.verify_rules(verify).await.unwrap_err();
    assert_eq!(refusal(&refused), unreadable);
    netconfig.claim("c2", &other).await.unwrap();
    netconfig.client.apply_rules(request("c2")).await.unwrap();
    assert_eq!(netconfig.differences("c2").await, [""; 0]);
    let peak = peak_memory(&netconfig);
    assert!(peak < MAX_PEAK, "{peak} KiB");
    crowded.nft("flush ruleset");
    netconfig.client.apply_rules(request("c1")).await.unwrap();
}
