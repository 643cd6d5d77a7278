//! Callers without permission or with false information are refused or deferred and logged; nothing changes.

use std::{fs, os::unix::net::UnixStream, path::Path, process::Command};

use inpod_proto::Class;
use integration::{
    Call, Cgroups, Inhabitant, Node, Pod, SERVICES, Spec, State, TIMEOUT, bin, eventually, methods,
    not_run_alone, run,
};

const UID: &str = "11111111-2222-3333-4444-555555555555";
const OTHER: &str = "22222222-3333-4444-5555-666666666666";

/// Runs a root process of a pod: in its cgroup, with its own mount, pid and network namespaces.
fn in_pod(cgroup: &Path, pod: &Pod, command: &str) -> anyhow::Result<String> {
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec unshare --mount --pid --fork --mount-proc nsenter --net={} sh -c '{command}'",
        cgroup.display(),
        pod.path().display()
    );
    run("sh", &["-c", &script])
}

// scenario: 68
#[test]
fn a_root_process_of_a_pod_that_sees_the_sockets_is_refused_every_call_and_it_is_written_down() {
    let made = Cgroups::new().and_then(|cgroups| Ok((cgroups.pod(UID)?, cgroups)));
    let (cgroup, _cgroups) = match made {
        Ok(made) => made,
        // Without its own cgroup no process looks like a pod's; unit tests cover path parsing.
        Err(error) => return not_run_alone(format!("it cannot make a cgroup: {error:#}")),
    };
    let node = Node::running().unwrap();
    // The pod's name in its path makes the process no host process, and no service.
    let strict = Node::new().unwrap();
    for service in SERVICES {
        strict
            .start_for("cgroup:/a/place/where/nobody/is", service)
            .unwrap();
    }
    let victim = node.pod(Spec::new("victim").ambient()).unwrap();
    let before = State::of(&node, &[&victim]).unwrap();
    eventually("they serve", TIMEOUT, || strict.api().status()).unwrap();
    // pod-events of that node is no service to the others, and logs that repeatedly.
    let own = format!("pid={} ", strict.pid("pod-events").unwrap());
    let impostor = bin("impostor").unwrap();
    let all = SERVICES.iter().flat_map(|service| {
        let calls = methods(service).into_iter();
        calls.map(move |call| (service, call))
    });
    for (component, call) in all {
        let socket = inpod_service::socket(&strict.run_dir(), component);
        let (impostor, socket) = (impostor.display(), socket.display());
        let command = format!("{impostor} call {socket} {call}");
        let answer = in_pod(&cgroup, &victim, &command).unwrap();
        assert!(
            answer.starts_with("PermissionDenied CALLER_REFUSED"),
            "{call}: {answer}"
        );
        let log = strict.tail(component, 1000);
        let audited = |line: &&str| {
            line.contains("WARN")
                && line.contains(&format!("method=\"{call}\""))
                && line.contains("Refused a caller")
                && line.contains("uid=0")
                && line.contains("kubepods")
                && !line.contains(&own)
        };
        assert_eq!(log.lines().filter(audited).count(), 1, "{call}: {log}");
    }
    before.unchanged(&node, &[&victim]).unwrap();
}

#[test]
fn doctor_in_a_pod_says_that_services_refuse_it_and_not_that_they_are_silent() {
    let made = Cgroups::new().and_then(|cgroups| Ok((cgroups.pod(UID)?, cgroups)));
    let (cgroup, _cgroups) = match made {
        Ok(made) => made,
        Err(error) => return not_run_alone(format!("it cannot make a cgroup: {error:#}")),
    };
    let (node, strict) = (Node::running().unwrap(), Node::new().unwrap());
    let pod = node.pod(Spec::new("debug")).unwrap();
    strict
        .start_for("cgroup:/nobody/is/here", "netconfig")
        .unwrap();
    eventually("it serves", TIMEOUT, || strict.api().claims()).unwrap();
    for (asked, verdict, is_refused) in [(&node, "ok", false), (&strict, "unknown", true)] {
        let (program, run_dir) = (bin("inpod").unwrap(), asked.run_dir());
        let (program, run_dir) = (program.display(), run_dir.display());
        let doctor = format!("{program} --run-dir {run_dir} doctor -o json || true");
        let reported = in_pod(&cgroup, &pod, &doctor).unwrap();
        let reported: serde_json::Value = serde_json::from_str(&reported).unwrap();
        let mut checks = reported["checks"].as_array().unwrap().iter();
        let is_it = |it: &&serde_json::Value| {
            it["code"] == "SERVICE_SILENT" && it["subject"] == "netconfig"
        };
        let check = checks.find(is_it).unwrap();
        assert_eq!(check["verdict"], verdict, "{check}");
        let found = check["found"].as_str().unwrap();
        assert_eq!(found.contains("CALLER_REFUSED"), is_refused, "{check}");
    }
}

/// Runs the words after it in a container of a pod, whose cgroup namespace begins there; `container` is a path below that of
/// the pod. The directory of a token says that this is a pod.
fn as_container(cgroups: &Cgroups, uid: &str, container: &str) -> Vec<String> {
    let mut words = cgroups.container(uid, container, "+all").unwrap();
    let script = "mkdir -p /run/secrets && mount -t tmpfs none /run/secrets && mkdir /run/secrets/kubernetes.io && exec \"$@\"";
    let inside = ["unshare", "--cgroup", "--mount", "sh", "-ec", script, "sh"];
    words.extend(inside.map(str::to_owned));
    words
}

/// runc starts a container in its cgroup, crun in a cgroup `container` below that.
#[test]
fn containers_of_one_pod_know_each_other_under_runc_and_crun() {
    let made = Cgroups::new();
    let cgroups = match made {
        Ok(made) => made,
        Err(error) => return not_run_alone(format!("it cannot make a cgroup: {error:#}")),
    };
    let impostor = bin("impostor").unwrap().display().to_string();
    for below in ["", "/container"] {
        let container = |letter: &str| format!("{}{below}", letter.repeat(64));
        let node = Node::new().unwrap();
        let within = as_container(&cgroups, UID, &container("a"));
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        node.start_within(&within, &node.run_dir(), "netconfig", &["--peer", "pod"])
            .unwrap();
        eventually("it serves", TIMEOUT, || node.api().claims()).unwrap();
        let socket = inpod_service::socket(&node.run_dir(), "netconfig");
        let socket = socket.display().to_string();
        let method = "/inpod.netconfig.v1.NetconfigService/ReleaseNetns";
        let call = [&impostor, "call", &socket, method];
        let answer = |uid: &str, letter: &str| {
            let within = as_container(&cgroups, uid, &container(letter));
            let words: Vec<_> = within.iter().map(String::as_str).chain(call).collect();
            run(words[0], &words[1..]).unwrap()
        };
        // It names no sandbox.
        let sibling = answer(UID, "b");
        assert!(sibling.starts_with("InvalidArgument"), "{below}: {sibling}");
        let stranger = answer(OTHER, "b");
        assert!(
            stranger.starts_with("PermissionDenied"),
            "{below}: {stranger}"
        );
    }
}

/// `kubectl inpod` runs the client in pod-events' container, by exec: its process has the container's cgroup.
#[test]
fn the_client_in_the_agents_pod_reads_all_services() {
    let cgroups = match Cgroups::new() {
        Ok(cgroups) => cgroups,
        Err(error) => return not_run_alone(format!("it cannot make a cgroup: {error:#}")),
    };
    let node = Node::new().unwrap();
    let run_dir = node.run_dir();
    let container = |letter: &str| as_container(&cgroups, UID, &letter.repeat(64));
    for (service, letter) in SERVICES.iter().zip(["a", "b", "c"]) {
        let within = container(letter);
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        node.start_within(&within, &run_dir, service, &["--peer", "pod"])
            .unwrap();
    }
    eventually("they serve", TIMEOUT, || node.api().status()).unwrap();
    let exec = |words: &[&str]| {
        // "c" names the container of pod-events, the last service.
        let within = container("c");
        let words: Vec<_> = within
            .iter()
            .map(String::as_str)
            .chain(words.iter().copied())
            .collect();
        run(words[0], &words[1..])
    };
    let (client, impostor) = (bin("inpod").unwrap(), bin("impostor").unwrap());
    let (client, impostor) = (client.display().to_string(), impostor.display().to_string());
    let directory = run_dir.display().to_string();
    for verb in ["pods", "binds"] {
        let printed = exec(&[&client, "--run-dir", &directory, verb]).unwrap();
        assert!(printed.starts_with("NAMESPACE"), "{verb}: {printed}");
    }
    for service in SERVICES {
        let socket = inpod_service::socket(&run_dir, service)
            .display()
            .to_string();
        // A stream would not end.
        let calls = methods(service).into_iter();
        for call in calls.filter(|call| !call.contains("/Watch")) {
            let answer = exec(&[&impostor, "call", &socket, &call]).unwrap();
            let refused = answer.starts_with("PermissionDenied CALLER_REFUSED");
            // A process of pod-events' container looks like pod-events itself.
            let may_call = match inpod_proto::class_of(&call).unwrap() {
                Class::Read => true,
                Class::Service => service != "pod-events",
                Class::Cni | Class::Operator => service == "pod-events",
            };
            assert_eq!(!refused, may_call, "{call}: {answer}");
        }
    }
}

// scenario: 68
#[test]
fn a_caller_whose_process_cannot_be_seen_is_refused() {
    let node = Node::new().unwrap();
    // A service that does not see the node's pids cannot identify callers.
    let program = bin("netconfig").unwrap();
    let run_dir = node.run_dir();
    let log = run_dir.with_file_name("unseeing.log");
    let mut service = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(program)
        .args(["--peer", "cgroup:/", "--log-format", "text", "--run-dir"])
        .arg(&run_dir)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let socket = inpod_service::socket(&run_dir, "netconfig");
    eventually("it listens", TIMEOUT, || {
        UnixStream::connect(&socket).map(drop)
    })
    .unwrap();
    let asked = node.api().claims();
    service.kill().unwrap();
    service.wait().unwrap();
    asked.unwrap_err();
    let log = fs::read_to_string(log).unwrap();
    assert!(
        log.contains("WARN") && log.contains("process is not visible from here"),
        "{log}"
    );
}

// scenario: 68
#[test]
fn a_caller_that_is_not_root_reaches_no_socket() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let before = State::of(&node, &[&pod]).unwrap();
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let possible = run("setpriv", &[&nobody[..], &["true"]].concat());
    if let Err(error) = possible {
        return not_run_alone(format!("there is no other user: {error:#}"));
    }
    for service in SERVICES {
        let error = asked_by(&nobody, &node, service);
        assert!(error.contains("Permission denied"), "{service}: {error}");
        // If the directories were open by mistake, the user would still differ.
        open(&node, service);
        let error = asked_by(&nobody, &node, service);
        assert!(
            !error.contains("Permission denied"),
            "{service} was not reached: {error}"
        );
        let log = node.tail(service, 20);
        assert!(log.contains("the peer has uid 65534"), "{service}: {log}");
    }
    before.unchanged(&node, &[&pod]).unwrap();
}

/// Asks for health as another user.
fn asked_by(user: &[&str], node: &Node, service: &str) -> String {
    let program = bin(service).unwrap().display().to_string();
    let run_dir = node.run_dir().display().to_string();
    let mut arguments = [
        user,
        &[&program, "--check", "--peer", "uid", "--run-dir", &run_dir],
    ]
    .concat();
    if service == "pod-events" {
        arguments.extend(["--node-name", "n", "--pods-from", "dir:/"]);
    }
    run("setpriv", &arguments).unwrap_err().to_string()
}

fn open(node: &Node, service: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let socket = inpod_service::socket(&node.run_dir(), service);
    let mode = |mode| fs::Permissions::from_mode(mode);
    for directory in [&node.run_dir(), socket.parent().unwrap()] {
        fs::set_permissions(directory, mode(0o755)).unwrap();
    }
    fs::set_permissions(socket, mode(0o666)).unwrap();
}

/// Returns a pod's rules, claim and workload, and whether ztunnel serves it.
fn in_place(node: &Node, pod: &Pod) -> anyhow::Result<(Vec<String>, usize, usize, bool)> {
    let served = node.ztunnel_state()?.to_string().contains(&pod.spec.uid);
    Ok((
        pod.traces()?,
        node.api().claims()?.len(),
        node.api().workloads()?.workloads.len(),
        served,
    ))
}

#[test]
fn a_deletion_of_what_is_alive_removes_nothing_and_is_written_down() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let _app = Inhabitant::of(&pod).unwrap();
    let before = in_place(&node, &pod).unwrap();
    assert!(before.3);
    let outcome = node.call(Call::del, &pod).run().unwrap();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, ""));
    assert_eq!(in_place(&node, &pod).unwrap(), before);
    let ends = format!("sandbox podnet/{}/eth0 ends", pod.container_id);
    let known = node.explain(&pod.spec).unwrap();
    assert!(
        known.timeline.iter().any(|entry| entry.event == ends),
        "{:?}",
        known.timeline
    );
    assert!(
        node.tail("pod-events", 20).contains("Deferred a deletion"),
        "{}",
        node.tail("pod-events", 20)
    );
    // A runtime whose DEL was a mistake adds the sandbox again.
    node.add(&pod).unwrap();
    node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_list_that_leaves_out_what_is_alive_removes_nothing_and_is_written_down() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let _app = Inhabitant::of(&pod).unwrap();
    let before = in_place(&node, &pod).unwrap();
    assert_eq!(
        node.api().collect("podnet", &[]).unwrap(),
        std::slice::from_ref(&pod.container_id)
    );
    assert_eq!(in_place(&node, &pod).unwrap(), before);
    assert!(node.tail("pod-events", 20).contains("Deferred a deletion"));
    node.add(&pod).unwrap();
    let whole = node.until_whole(&pod.spec).unwrap();
    assert!(node.api().collect("othernet", &[]).unwrap().is_empty());
    assert_eq!(
        node.until_whole(&pod.spec).unwrap().timeline,
        whole.timeline
    );
}

#[test]
fn an_add_with_the_container_of_another_pod_changes_nothing_of_that() {
    let node = Node::running().unwrap();
    let victim = node.pod(Spec::new("victim").ambient()).unwrap();
    let other = node.sandbox(Spec::new("other").ambient()).unwrap();
    node.until_known(&other.spec).unwrap();
    let before = State::of(&node, &[&victim]).unwrap();
    let mut call = node.call(Call::add, &other);
    for (name, value) in &mut call.environment {
        if name == "CNI_CONTAINERID" {
            value.clone_from(&victim.container_id);
        }
    }
    let outcome = call.run().unwrap();
    let text = "belongs to the pod shop/victim";
    assert!(
        outcome.code != 0 && outcome.stdout.contains(text),
        "{outcome:?}"
    );
    before.unchanged(&node, &[&victim]).unwrap();
    node.until_whole(&victim.spec).unwrap();
}
