//! Nothing but the call, the conflist, the socket and the state directory influences the plugin.

use std::{io, net::TcpListener, path::Path};

use integration::{Call, Node, Pod, Spec, bin, run};
use nix::sys::signal::Signal;

/// Returns variables that a service, proxy-aware client, logger or runtime library would follow.
fn hostile(listener: &TcpListener) -> Vec<(String, String)> {
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let proxies = ["http_proxy", "https_proxy", "all_proxy", "grpc_proxy"];
    let upper = proxies.map(str::to_uppercase);
    let proxies = proxies
        .iter()
        .copied()
        .chain(upper.iter().map(String::as_str));
    let named = proxies.map(|name| (name.to_owned(), proxy.clone()));
    let others = [
        ("NO_PROXY", ""),
        ("HOME", "/nowhere"),
        ("TMPDIR", "/nowhere"),
        ("XDG_RUNTIME_DIR", "/nowhere"),
        ("XDG_CONFIG_HOME", "/nowhere"),
        ("RUST_LOG", "trace"),
        ("RUST_BACKTRACE", "full"),
        ("RUST_LIB_BACKTRACE", "1"),
        ("RUST_MIN_STACK", "1"),
        ("TOKIO_WORKER_THREADS", "no number"),
        ("TZ", ":/nowhere"),
        ("LANG", "nowhere"),
        ("LC_ALL", "nowhere"),
        ("SSL_CERT_FILE", "/nowhere"),
        ("KUBECONFIG", "/nowhere"),
        ("KUBERNETES_SERVICE_HOST", "192.0.2.1"),
        ("CNI_PATH", "/nowhere:\n"),
        ("INPOD_RUN_DIR", "/nowhere"),
        ("INPOD_PEER", "nobody"),
        ("INPOD_LOG_LEVEL", "trace"),
        ("INPOD_AGENT_SOCKET", "/nowhere"),
        ("INPOD_AGENTSOCKET", "/nowhere"),
        ("INPOD_STATE_DIR", "/nowhere"),
        ("INPOD_TIMEOUT_SECONDS", "0"),
        ("INPOD_EXCLUDE_NAMESPACES", "shop"),
        ("INPOD_AGENT_UNAVAILABLE", "allow"),
        ("INPOD_NO_SUCH_THING", "1"),
    ];
    named
        .chain(others.map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect()
}

fn with(mut call: Call, variables: &[(String, String)]) -> Call {
    for (name, value) in variables {
        call = call.with_var(name, value);
    }
    call
}

#[test]
fn no_variable_but_those_of_cni_changes_what_a_call_does() {
    let node = Node::running().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let hostile = hostile(&listener);
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let plain = node.call(Call::add, &pod);
    let outcome = with(plain.clone(), &hostile).run().unwrap();
    assert_eq!(
        (outcome.code, outcome.stdout),
        (0, plain.run().unwrap().stdout)
    );
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    node.until_whole(&pod.spec).unwrap();
    let outcome = with(node.call(Call::del, &pod), &hostile).run().unwrap();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, ""));
    assert!(node.api().claims().unwrap().is_empty());
    let asked = listener.accept().unwrap_err();
    assert_eq!(
        asked.kind(),
        io::ErrorKind::WouldBlock,
        "the proxy was asked"
    );
}

#[test]
fn no_variable_changes_what_is_done_while_the_agent_is_away() {
    let node = Node::running().unwrap();
    node.pod(Spec::new("b").ambient()).unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let hostile = hostile(&listener);
    let outcome = with(node.call(Call::add, &pod), &hostile).run().unwrap();
    let (code, words) = outcome.refusal().unwrap();
    assert!(
        code == 11 && words.contains("namespace shop"),
        "{code} {words}"
    );
    let outcome = with(node.call(Call::del, &pod), &hostile).run().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let spooled = std::fs::read_dir(node.state_dir().join("spool")).unwrap();
    assert_eq!(spooled.count(), 1);
}

/// Executes the plugin in a root with only itself, its libraries, socket, state directory and the netns: no `/etc`,
/// `/proc`, `/dev`, `/tmp`, no home.
fn in_an_empty_root(node: &Node, call: &Call) -> anyhow::Result<String> {
    let plugin = bin("inpod-cni")?;
    let (run_dir, state_dir) = (node.run_dir(), node.state_dir());
    let bind = |path: &Path| {
        let path = path.display();
        format!("mkdir -p /mnt{path} && mount --rbind {path} /mnt{path}\n")
    };
    let mut script = "set -e; mount -t tmpfs tmpfs /mnt\n".to_owned();
    for path in [
        &run_dir.join("pod-events"),
        &state_dir,
        Path::new("/run/netns"),
    ] {
        script += &bind(path);
    }
    for path in ["/usr/lib", "/lib", "/lib64"].map(Path::new) {
        if path.exists() {
            script += &bind(path);
        }
    }
    script += &format!("cp {} /mnt/plugin\n", plugin.display());
    script += "exec env -i \"$@\" chroot /mnt /plugin";
    let variables = call
        .environment
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    let stdin = format!("{}/call", state_dir.display());
    std::fs::write(&stdin, &call.stdin)?;
    let script = format!("({script}) < {stdin}");
    let mut arguments: Vec<String> = ["--mount", "--propagation", "private", "bash", "-c"]
        .map(str::to_owned)
        .into();
    arguments.extend([script, "bash".to_owned()]);
    arguments.extend(variables);
    run("unshare", &arguments)
}

fn expected(call: &Call) -> String {
    let stdin: serde_json::Value = serde_json::from_str(&call.stdin).unwrap();
    stdin.get("prevResult").unwrap().to_string()
}

#[test]
fn the_plugin_needs_no_file_but_its_socket_and_the_netns() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let add = node.call(Call::add, &pod);
    assert_eq!(in_an_empty_root(&node, &add).unwrap(), expected(&add));
    node.until_whole(&pod.spec).unwrap();
    let del = node.call(Call::del, &pod);
    assert_eq!(in_an_empty_root(&node, &del).unwrap(), "");
    assert!(node.api().claims().unwrap().is_empty());
}

#[test]
fn a_state_directory_is_all_that_it_writes_to() {
    let node = Node::running().unwrap();
    let pod: Pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    // Even /proc is missing: recording a DEL needs no boot id.
    assert_eq!(
        in_an_empty_root(&node, &node.call(Call::del, &pod)).unwrap(),
        ""
    );
    let spooled = std::fs::read_dir(node.state_dir().join("spool")).unwrap();
    assert_eq!(spooled.count(), 1);
}
