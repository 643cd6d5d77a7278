//! Observed state follows desired state while pods run.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::common::mesh::{Mesh, PORT};
use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use inpod_proto::{
    podevents::v1::{ExplainPodResponse, PodState},
    types::v1::Reason,
};
use integration::{
    App, Call, Cgroups, Inhabitant, Node, Pod, SERVICES, Spec, TIMEOUT, ask, eventually, exchange,
    source_seen,
};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};

/// Longer than two repairs, the second held.
const HELD: Duration = Duration::from_secs(25);

fn wait_for_event(node: &Node, pod: &Pod, event: &str) -> ExplainPodResponse {
    eventually(event, TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        let mut entries = known.timeline.iter();
        ensure!(
            entries.any(|entry| entry.event.contains(event)),
            "{:?}",
            known.timeline
        );
        anyhow::Ok(known)
    })
    .unwrap()
}

fn metrics(node: &Node) -> String {
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime
        .block_on(inpod_service::metrics::fetch(&socket))
        .unwrap()
}

fn count_drift(node: &Node, kind: &str) -> u64 {
    let text = metrics(node);
    let name = format!("inpod_pod_events_drift_total{{kind=\"{kind}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap().parse().unwrap()
}

fn changed(node: &Node, pod: &mut Pod, change: impl FnOnce(Spec) -> Spec) {
    pod.spec = change(pod.spec.clone());
    node.write_manifest(&pod.spec).unwrap();
}

#[test]
fn an_annotation_on_a_running_pod_changes_its_rules_and_cuts_no_connection() {
    let mut mesh = Mesh::new().unwrap();
    let to = SocketAddr::new(mesh.b.v4.into(), PORT);
    let stream = integration::connect(&mesh.outsider.netns, to).unwrap();
    let (_, mut captured) = source_seen(stream).unwrap();
    exchange(&mut captured, "before").unwrap();
    assert!(!mesh.b.ruleset().unwrap().contains("15053"));
    changed(&mesh.node, &mut mesh.b, |spec| {
        spec.annotated("ambient.istio.io/dns-capture", "true")
    });
    eventually("name resolution is captured", TIMEOUT, || {
        ensure!(mesh.b.ruleset()?.contains("15053"));
        anyhow::Ok(())
    })
    .unwrap();
    mesh.node.until_whole(&mesh.b.spec).unwrap();
    exchange(&mut captured, "after").unwrap();
    // Back to the rules of before.
    changed(&mesh.node, &mut mesh.b, |spec| {
        spec.annotated("ambient.istio.io/dns-capture", "false")
    });
    eventually("name resolution is left alone again", TIMEOUT, || {
        ensure!(!mesh.b.ruleset()?.contains("15053"));
        anyhow::Ok(())
    })
    .unwrap();
    exchange(&mut captured, "still").unwrap();
    mesh.reached_from_outside().unwrap();
}

#[test]
fn an_annotation_that_cannot_be_had_changes_nothing_of_a_running_pod_and_is_reported() {
    let mut mesh = Mesh::new().unwrap();
    let before = mesh.b.ruleset().unwrap();
    changed(&mesh.node, &mut mesh.b, |spec| {
        spec.annotated("istio.io/reroute-virtual-interfaces", "no interface")
    });
    let refused = eventually("the failure is reported", TIMEOUT, || {
        let known = mesh.node.explain(&mesh.b.spec)?;
        known.last_failure.context("no failure")
    })
    .unwrap();
    assert_eq!(refused.reason(), Reason::InvalidField);
    assert_eq!(mesh.b.ruleset().unwrap(), before);
    assert_eq!(
        mesh.node.explain(&mesh.b.spec).unwrap().state(),
        PodState::Enrolled
    );
    changed(&mesh.node, &mut mesh.b, |spec| {
        spec.annotated("istio.io/reroute-virtual-interfaces", "")
    });
    eventually("nothing is wrong any more", TIMEOUT, || {
        let known = mesh.node.explain(&mesh.b.spec)?;
        ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn an_address_that_comes_later_is_probed_and_one_that_is_not_the_pods_is_not() {
    let node = Node::running().unwrap();
    let mut pod = node.pod(Spec::new("web").ambient()).unwrap();
    pod.exec(&["ip", "addr", "add", "10.77.200.7/32", "dev", "eth0"])
        .unwrap();
    let [v4, _] = pod.addresses();
    changed(&node, &mut pod, |spec| Spec {
        addresses: vec![
            v4,
            "10.77.200.7".parse().unwrap(),
            "10.77.200.8".parse().unwrap(),
        ],
        ..spec
    });
    eventually("its own address is probed", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        let wanted = [v4.to_string(), "10.77.200.7".to_owned()];
        ensure!(known.addresses == wanted, "{:?}", known.addresses);
        anyhow::Ok(())
    })
    .unwrap();
    // An earlier sandbox's status shows nothing of this one.
    changed(&node, &mut pod, |spec| Spec {
        addresses: vec!["10.77.200.9".parse().unwrap()],
        ..spec
    });
    changed(&node, &mut pod, |spec| {
        spec.annotated("ambient.istio.io/dns-capture", "true")
    });
    eventually("the later change is applied", TIMEOUT, || {
        ensure!(pod.ruleset()?.contains("15053"));
        anyhow::Ok(())
    })
    .unwrap();
    let known = node.explain(&pod.spec).unwrap();
    assert_eq!(known.addresses, [v4.to_string(), "10.77.200.7".to_owned()]);
}

#[test]
fn a_pod_that_ran_before_inpod_is_found_when_it_is_labelled_and_followed_like_any_other() {
    let node = Node::new().unwrap();
    let cgroups = Cgroups::new().unwrap();
    let outsider = node.sandbox(Spec::new("outsider")).unwrap();
    let spec = Spec {
        uid: "7b2e1c04-52d7-4a4e-9f0e-3a1f5d6c7e80".to_owned(),
        ..Spec::new("old")
    };
    let mut pod = node.sandbox(spec).unwrap();
    pod.spec.addresses = pod.addresses().to_vec();
    node.write_manifest(&pod.spec).unwrap();
    let inhabitant = Inhabitant::of(&pod).unwrap();
    cgroups.put(&pod, inhabitant.pid()).unwrap();
    let _app = App::start(&pod.netns, PORT).unwrap();
    node.start_all().unwrap();
    node.ready().unwrap();
    assert!(node.api().claims().unwrap().is_empty());

    changed(&node, &mut pod, Spec::ambient);
    node.until_whole(&pod.spec).unwrap();
    ask(&outsider.netns, SocketAddr::new(pod.v4.into(), PORT)).unwrap();
    let last = |node: &Node| node.accesses().unwrap().last().map(|it| it.listener);
    assert_eq!(last(&node), Some(15006));
    // A discovered pod is withdrawn and enrolled without another search.
    changed(&node, &mut pod, |spec| Spec { mode: None, ..spec });
    node.until(&pod.spec, PodState::Out, TIMEOUT).unwrap();
    changed(&node, &mut pod, Spec::ambient);
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_wanted_pod_that_has_no_process_yet_is_searched_for_until_it_has() {
    let node = Node::running().unwrap();
    let cgroups = Cgroups::new().unwrap();
    let spec = Spec {
        uid: "8c3f2d15-63e8-4b5f-8a1f-4b206e7d8f91".to_owned(),
        ..Spec::new("late")
    };
    let mut pod = node.sandbox(spec).unwrap();
    pod.spec.addresses = pod.addresses().to_vec();
    changed(&node, &mut pod, Spec::ambient);
    let missed = eventually("it is looked for", TIMEOUT, || {
        node.explain(&pod.spec)?.last_failure.context("no failure")
    })
    .unwrap();
    assert_eq!(missed.reason(), Reason::NetnsNotFound);
    let inhabitant = Inhabitant::of(&pod).unwrap();
    cgroups.put(&pod, inhabitant.pid()).unwrap();
    eventually("it is found", Duration::from_secs(60), || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.state() == PodState::Enrolled, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn an_annotated_pod_without_an_address_has_not_failed() {
    let node = Node::new().unwrap();
    let spec = Spec {
        is_redirected: true,
        ..Spec::new("rebooted").ambient()
    };
    let mut pod = node.sandbox(spec).unwrap();
    node.start_all().unwrap();
    let starts = || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.next_step.contains("search"), "{known:?}");
        ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        anyhow::Ok(())
    };
    eventually("it is awaited", TIMEOUT, starts).unwrap();
    pod.spec.addresses = pod.addresses().to_vec();
    node.write_manifest(&pod.spec).unwrap();
    eventually("its netns is missed", TIMEOUT, || {
        let missed = node.explain(&pod.spec)?.last_failure;
        ensure!(missed.context("no failure")?.reason() == Reason::NetnsNotFound);
        anyhow::Ok(())
    })
    .unwrap();
    changed(&node, &mut pod, |spec| Spec {
        addresses: Vec::new(),
        ..spec
    });
    let starts = || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        anyhow::Ok(())
    };
    eventually("it is awaited again", TIMEOUT, starts).unwrap();
    node.ready().unwrap();
    node.add(&pod).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

/// Returns a node that checks listeners each second.
fn checked_each_second() -> Node {
    let node = Node::new().unwrap();
    for service in SERVICES.iter().filter(|it| **it != "pod-events") {
        node.start(service).unwrap();
    }
    let settings = ["--peer", "uid", "--listener-check-seconds", "1"];
    node.start_with("pod-events", &settings).unwrap();
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    node
}

/// Waits for the reason of the pod's failure; `None` for none.
fn wait_for_failure(node: &Node, pod: &Pod, reason: Option<Reason>) -> String {
    let number = reason.map(i32::from);
    eventually(&format!("the failure {reason:?}"), TIMEOUT, || {
        let failure = node.explain(&pod.spec)?.last_failure;
        let found = failure.as_ref().map(|failure| failure.reason);
        ensure!(found == number, "{failure:?}");
        anyhow::Ok(failure.unwrap_or_default().message)
    })
    .unwrap()
}

/// Listens on a port of ztunnel beside ztunnel, by a process in the pod: sockets of one user may share a port.
fn join_ztunnel(pod: &Pod, port: u16, mark: u32) -> Child {
    let socket = pod.netns.within(|| {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
        socket.set_reuse_port(true)?;
        socket.set_mark(mark)?;
        socket.bind(&SocketAddr::from(([0_u16; 8], port)).into())?;
        socket.listen(1).map(|()| socket)
    });
    let net = format!("--net={}", pod.path().display());
    let mut process = Command::new("nsenter");
    process.args([&net, "sleep", "60"]);
    let socket = OwnedFd::from(socket.unwrap().unwrap());
    process.stdin(socket).spawn().unwrap()
}

#[test]
fn a_listener_of_the_pod_on_a_port_of_ztunnel_is_a_failure() {
    let node = checked_each_second();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    for mark in [0, 0x539] {
        let mut thief = join_ztunnel(&pod, 15006, mark);
        let message = wait_for_failure(&node, &pod, Some(Reason::ListenerTaken));
        let pid = thief.id();
        let named =
            format!("TCP port 15006 is held by sleep (pid {pid}, uid 0) instead of ztunnel.");
        assert_eq!(message, named, "mark {mark:#x}");
        let findings = node.explain(&pod.spec).unwrap().rules.unwrap().findings;
        assert_eq!(findings, [format!("TCP port 15006: {named}")]);
        thief.kill().unwrap();
        thief.wait().unwrap();
        wait_for_failure(&node, &pod, None);
        wait_for_event(&node, &pod, "its traffic reaches ztunnel again");
    }
}

#[test]
fn dns_capture_without_dns_of_ztunnel_is_refused_or_a_failure() {
    let node = checked_each_second();
    let dns = |name| {
        let spec = Spec::new(name).ambient();
        spec.annotate("ambient.istio.io/dns-capture", "true")
    };
    let pod = node.pod(dns("web")).unwrap();
    let other = node.sandbox(dns("other")).unwrap();
    let mut plain = node.pod(Spec::new("plain").ambient()).unwrap();
    node.stop("ztunnel", Signal::SIGTERM).unwrap();
    node.start_ztunnel_without_dns().unwrap();
    node.ready().unwrap();
    let words = "ztunnel does not listen on TCP port 15053: its DNS proxy is off";
    let message = wait_for_failure(&node, &pod, Some(Reason::ListenerLost));
    assert!(
        message.contains(words) && message.contains("UDP port 15053"),
        "{message}"
    );
    let (_, refusal) = node
        .call(Call::add, &other)
        .run()
        .unwrap()
        .refusal()
        .unwrap();
    assert!(
        refusal.contains(words) && refusal.contains("[LISTENER_LOST]"),
        "{refusal}"
    );
    assert_eq!(other.traces().unwrap(), [""; 0]);
    changed(&node, &mut plain, |spec| {
        spec.annotated("ambient.istio.io/dns-capture", "true")
    });
    wait_for_failure(&node, &plain, Some(Reason::ListenerLost));
    assert!(!plain.ruleset().unwrap().contains("15053"));
    node.stop("ztunnel", Signal::SIGTERM).unwrap();
    node.start_ztunnel(&[]).unwrap();
    for pod in [&pod, &plain] {
        wait_for_failure(&node, pod, None);
    }
    node.add(&other).unwrap();
}

/// Creates a container in a netns of the given name behind the bridge docker0 of a pod, like dockerd in the pod.
const CONTAINER: &str = "ip netns add NAME
    ip link add docker0 type bridge
    ip addr add 172.17.0.1/16 dev docker0
    ip link set docker0 up
    ip link add inner type veth peer name eth0 netns NAME
    ip link set inner master docker0 up
    ip -n NAME link set lo up
    ip -n NAME addr add 172.17.0.2/16 dev eth0
    ip -n NAME link set eth0 up
    ip -n NAME route add default via 172.17.0.1
    echo 1 > /proc/sys/net/ipv4/ip_forward
    iptables-nft -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE";

#[test]
fn a_bridge_whose_containers_hang_is_a_failure_until_it_is_named() {
    let node = checked_each_second();
    let mut pod = node.pod(Spec::new("dind").ambient()).unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _app = App::start(&server.netns, PORT).unwrap();
    let name = format!("inner-{}", std::process::id());
    pod.exec(&["sh", "-ec", &CONTAINER.replace("NAME", &name)])
        .unwrap();
    let roots = ["/run/netns".into()];
    let container = Netns::open(&Path::new("/run/netns").join(name), &roots).unwrap();
    let message = wait_for_failure(&node, &pod, Some(Reason::TrafficBlocked));
    for part in [
        "the bridge docker0 hang",
        "istio.io/reroute-virtual-interfaces",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let to = SocketAddr::new(server.v4.into(), PORT);
    ask(&container, to).unwrap_err();
    let captured = || {
        let all = node.accesses().unwrap().into_iter();
        all.filter(|it| it.event == "accepted" && it.listener == 15001)
            .count()
    };
    let before = captured();
    changed(&node, &mut pod, |spec| {
        spec.annotated("istio.io/reroute-virtual-interfaces", "docker*")
    });
    wait_for_failure(&node, &pod, None);
    ask(&container, to).unwrap();
    assert_eq!(captured(), before + 1);
}

#[test]
fn a_drop_policy_that_stops_redirected_connections_is_a_failure() {
    let node = checked_each_second();
    let pod = node.pod(Spec::new("vpn").ambient()).unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _app = App::start(&server.netns, PORT).unwrap();
    let to = SocketAddr::new(server.v4.into(), PORT);
    ask(&pod.netns, to).unwrap();
    let iptables = |rule: &str| {
        let words = ["iptables-nft"].into_iter().chain(rule.split(' '));
        pod.exec(&words.collect::<Vec<_>>()).unwrap();
    };
    iptables("-A OUTPUT -o lo -j ACCEPT");
    iptables("-P OUTPUT DROP");
    let message = wait_for_failure(&node, &pod, Some(Reason::TrafficBlocked));
    let dropped = "now the pod's outbound connections are dropped";
    assert!(message.contains(dropped), "{message}");
    ask(&pod.netns, to).unwrap_err();
    iptables("-A OUTPUT -p tcp --dport 15001 -j ACCEPT");
    iptables("-A OUTPUT -m mark --mark 0x539/0xfff -j ACCEPT");
    wait_for_failure(&node, &pod, None);
    ask(&pod.netns, to).unwrap();
}

#[test]
fn a_rule_of_the_pod_with_ztunnels_mark_is_a_failure() {
    let node = checked_each_second();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let server = node.pod(Spec::new("server")).unwrap();
    let _app = App::start(&server.netns, PORT).unwrap();
    let to = SocketAddr::new(server.v4.into(), PORT);
    let captured = || {
        let all = node.accesses().unwrap().into_iter();
        all.filter(|it| it.event == "accepted").count()
    };
    ask(&pod.netns, to).unwrap();
    let before = captured();
    assert!(before > 0);
    let mark = |verb: &str| {
        let rule = [
            "-t",
            "mangle",
            verb,
            "OUTPUT",
            "-j",
            "MARK",
            "--set-mark",
            "0x539",
        ];
        pod.exec(&[&["iptables-nft"][..], &rule].concat()).unwrap();
    };
    mark("-A");
    let message = wait_for_failure(&node, &pod, Some(Reason::TrafficBypassed));
    let named = "Chain OUTPUT of table ip mangle gives packets ztunnel's mark: their connections bypass ztunnel.";
    assert_eq!(message, named);
    ask(&pod.netns, to).unwrap();
    assert_eq!(captured(), before, "the connection bypassed ztunnel");
    mark("-D");
    wait_for_failure(&node, &pod, None);
    ask(&pod.netns, to).unwrap();
    assert!(captured() > before);
}

// scenario: 7
#[test]
fn a_listener_that_is_lost_is_restored_while_its_ztunnel_goes_on() {
    let node = checked_each_second();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let other = node.pod(Spec::new("other").ambient()).unwrap();
    let outsider = node.pod(Spec::new("outsider")).unwrap();
    let _app = App::start(&pod.netns, PORT).unwrap();
    let to = SocketAddr::new(pod.v4.into(), PORT);
    ask(&outsider.netns, to).unwrap();
    let sessions = || {
        let all = node.api().workloads().unwrap().workloads.into_iter();
        let states = all.flat_map(|workload| workload.states);
        states
            .map(|state| state.session_id)
            .collect::<BTreeSet<_>>()
    };
    let before = sessions();
    for family in ["-4", "-6"] {
        pod.exec(&["ss", "-K", "-t", "-l", family, "sport = :15006"])
            .unwrap();
    }
    ask(&outsider.netns, to).unwrap_err();
    wait_for_event(&node, &pod, "ztunnel does not listen on TCP port 15006");
    eventually("it is captured and served again", TIMEOUT, || {
        ask(&outsider.netns, to)
    })
    .unwrap();
    assert_eq!(sessions(), before, "the session went on");
    let untouched = node.explain(&other.spec).unwrap();
    let noted = |known: &ExplainPodResponse| {
        let mut entries = known.timeline.iter();
        entries.any(|entry| entry.event.contains("ztunnel again"))
    };
    assert!(!noted(&untouched), "{:?}", untouched.timeline);
}

#[test]
fn another_agent_that_undoes_repairs_is_not_fought_for_long_and_the_pod_is_repaired_in_the_end() {
    if !integration::is_full_run() {
        return;
    }
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let fights = AtomicBool::new(true);
    let mends = |known: &ExplainPodResponse| {
        let entries = known.timeline.iter();
        entries
            .filter(|entry| entry.event.starts_with("repaired rules"))
            .count()
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            while fights.load(Ordering::Relaxed) {
                pod.exec(&["nft", "flush", "ruleset"]).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let contested = eventually("it is reported", TIMEOUT, || {
            let known = node.explain(&pod.spec)?;
            let failure = known.last_failure.clone().context("no failure")?;
            ensure!(failure.reason() == Reason::RulesContested, "{failure:?}");
            anyhow::Ok(known)
        });
        // The other one stops in any case.
        let before = contested.as_ref().map_or(0, mends);
        let began = Instant::now();
        let mut most = before;
        while began.elapsed() < HELD {
            most = node
                .explain(&pod.spec)
                .map_or(most, |known| most.max(mends(&known)));
            thread::sleep(Duration::from_millis(500));
        }
        fights.store(false, Ordering::Relaxed);
        contested.unwrap();
        let more = most - before;
        assert!(more <= 2, "{more} repairs in {HELD:?}");
    });
    eventually("it is repaired", Duration::from_secs(90), || {
        let known = node.explain(&pod.spec)?;
        let rules = known.rules.context("no rules")?;
        ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
        ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn routes_lost_while_lo_was_down_are_restored() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let repairs = || {
        let entries = node.explain(&pod.spec).unwrap().timeline.into_iter();
        entries
            .filter(|it| it.event.starts_with("repaired rules"))
            .count()
    };
    for (step, commands) in [
        ("goes down and up", &[&["down"], &["up"]][..]),
        ("stays down", &[&["down"]]),
    ] {
        let before = repairs();
        for state in commands {
            pod.exec(&["ip", "link", "set", "lo", state[0]]).unwrap();
        }
        eventually(&format!("it is repaired after lo {step}"), TIMEOUT, || {
            ensure!(repairs() > before);
            let routes = pod.exec(&["ip", "-6", "route", "show", "table", "10500"])?;
            ensure!(routes.contains("local default dev lo"), "{routes}");
            anyhow::Ok(())
        })
        .unwrap();
    }
    node.until_whole(&pod.spec).unwrap();
}

// scenario: 2
#[test]
fn what_was_repaired_is_counted_by_kind() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("web").ambient()).unwrap();
    let count = |kind: &str| count_drift(&node, kind);
    assert_eq!((count("flushed"), count("changed")), (0, 0));
    pod.exec(&["nft", "flush", "ruleset"]).unwrap();
    eventually("the flush is counted", TIMEOUT, || {
        ensure!(count("flushed") == 1);
        anyhow::Ok(())
    })
    .unwrap();
    node.until_whole(&pod.spec).unwrap();
    pod.exec(&["ip", "rule", "del", "pref", "500"]).unwrap();
    eventually("the change is counted", TIMEOUT, || {
        ensure!(count("changed") == 1);
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(count("flushed"), 1);
    node.until_whole(&pod.spec).unwrap();
}
