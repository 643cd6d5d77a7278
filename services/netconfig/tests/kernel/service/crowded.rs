//! Processes of a pod fill its netns with objects, which must cost neither netconfig nor other pods much.

use std::{fmt::Write as _, fs, io::Write as _, os::fd::AsRawFd as _};

use inpod_proto::netconfig::v1::{
    ApplyRulesRequest, InspectNetnsRequest, VerifyRulesRequest, inspect_netns_request,
};
use inpod_types::Reason;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, send, socket};
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

/// Adds equal ip rules with ztunnel's mark. ip(8) would compare each rule with all others.
fn add_marked_rules(fresh: &Fresh, count: u32) {
    const ATTRIBUTES: [(u16, u32); 2] = [(10, 0x539), (16, 0xfff)]; // FRA_FWMARK, FRA_FWMASK
    fresh.run(move || {
        let (flags, netlink) = (SockFlag::empty(), SockProtocol::NetlinkRoute);
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, netlink).unwrap();
        for number in 0..count {
            // The kernel looks for the place from the lowest priority on, so that a falling number is fast.
            let priority = (6, 32_000 - number / 64); // FRA_PRIORITY
            let attributes = ATTRIBUTES.into_iter().chain([priority]);
            let attributes = attributes.flat_map(|(kind, value)| {
                let header = [8_u16, kind].map(u16::to_ne_bytes).concat();
                [header, value.to_ne_bytes().to_vec()].concat()
            });
            // struct fib_rule_hdr: AF_INET, to table 50.
            let mut body = vec![2, 0, 0, 0, 50, 0, 0, 1, 0, 0, 0, 0];
            body.extend(attributes);
            let length = u32::try_from(body.len() + 16).unwrap();
            // RTM_NEWRULE, NLM_F_REQUEST and NLM_F_CREATE.
            let header = [32_u16, 0x401].map(u16::to_ne_bytes).concat();
            let message = [length.to_ne_bytes().to_vec(), header, vec![0; 8], body].concat();
            send(socket.as_raw_fd(), &message, MsgFlags::empty()).unwrap();
        }
    });
}

#[tokio::test]
async fn too_many_ip_rules_are_refused_by_name_and_other_pods_join() {
    let mut netconfig = Netconfig::start().await;
    let (crowded, other) = (pod_netns(), pod_netns());
    netconfig.claim("c1", &crowded).await.unwrap();
    add_marked_rules(&crowded, 1_000);
    netconfig.client.apply_rules(request("c1")).await.unwrap();
    add_marked_rules(&crowded, 16_000);
    let verify = VerifyRulesRequest {
        sandbox: wire("c1"),
        redirection: ambient(),
    };
    let refused = netconfig.client.verify_rules(verify).await.unwrap_err();
    let unreadable = (Code::FailedPrecondition, Reason::RulesUnreadable);
    assert_eq!(refusal(&refused), unreadable);
    let message = refused.message();
    assert!(
        message.contains("cannot read the IPv4 ip rules"),
        "{message}"
    );
    let inspect = InspectNetnsRequest {
        target: wire("c1").map(inspect_netns_request::Target::Sandbox),
        ..InspectNetnsRequest::default()
    };
    let refused = netconfig.client.inspect_netns(inspect).await.unwrap_err();
    assert_eq!(refusal(&refused), unreadable);
    netconfig.claim("c2", &other).await.unwrap();
    netconfig.client.apply_rules(request("c2")).await.unwrap();
    assert_eq!(netconfig.differences("c2").await, [""; 0]);
}
