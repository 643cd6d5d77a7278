//! Calls that no runtime should make: each is refused with a message that names the fault, and leaves kernel,
//! services and disk as they were.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::unix::ffi::OsStrExt as _,
    process::{Command, Stdio},
};

use inpod_proto::podevents::v1::PodState;
use integration::{Call, Node, Outcome, Pod, Running, Spec, State, TIMEOUT, bin};
use serde_json::{Value, json};

/// A pod in the mesh, and a sandbox for the calls. Afterwards all is as it was.
struct Scene {
    victim: Pod,
    pod: Pod,
    before: State,
    node: Node,
}

impl Scene {
    fn new() -> Self {
        let node = Node::running().unwrap();
        let victim = node.pod(Spec::new("victim").ambient()).unwrap();
        let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
        let before = State::of(&node, &[&victim, &pod]).unwrap();
        Self {
            victim,
            pod,
            before,
            node,
        }
    }

    fn add(&self) -> Call {
        self.node.call(Call::add, &self.pod).timeout_seconds(5)
    }

    /// Expects this code and text before the deadline.
    fn refused(&self, call: &Call, code: u64, named: &str) {
        let what = format!("{call:?}").chars().take(900).collect::<String>();
        judge(&call.run().unwrap(), code, named, &what);
    }

    fn refused_stdin(&self, stdin: &[u8], code: u64, named: &str) {
        let what = String::from_utf8_lossy(stdin.get(..200).unwrap_or(stdin)).into_owned();
        let variables = self.add().environment;
        let running = Running::start(variables, stdin, &[]).unwrap();
        judge(&running.wait().unwrap(), code, named, &what);
    }

    /// Expects no change, and a successful ADD, so that the refused part was the only fault.
    fn ends(self) {
        self.before
            .unchanged(&self.node, &[&self.victim, &self.pod])
            .unwrap();
        self.node.add(&self.pod).unwrap();
        self.node.until_whole(&self.pod.spec).unwrap();
        self.node.until_whole(&self.victim.spec).unwrap();
    }
}

fn judge(outcome: &Outcome, code: u64, named: &str, what: &str) {
    let (found, words) = outcome.refusal().unwrap();
    assert!(
        found == code && words.contains(named),
        "{found} {words}, not {code} {named}: {what}"
    );
    assert!(words.len() < 2000, "{} bytes: {what}", words.len());
    assert!(outcome.took < TIMEOUT, "{:?}: {what}", outcome.took);
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
}

#[test]
fn a_stdin_that_is_no_configuration_is_refused_with_its_fault() {
    let scene = Scene::new();
    let good = scene.add().stdin;
    let megabytes = "x".repeat(10 << 20);
    let long = good.replacen('{', &format!("{{\"more\":\"{megabytes}\","), 1);
    let deep = |inside: &str| good.replacen('{', &format!("{{\"more\":{inside},"), 1);
    let (open, close) = ("[".repeat(100_000), "]".repeat(100_000));
    for (stdin, code, named) in [
        (&b""[..], 6, "it is empty"),
        (b" \n\t", 6, "it is empty"),
        (b"[]", 6, "'{'"),
        (b"7", 6, "'{'"),
        (b"null", 6, "'{'"),
        (b"\"ADD\"", 6, "'{'"),
        (b"\0", 6, "'{'"),
        (b"{\"cniVersion\":\"1.0.0\"\0}", 6, "column"),
        (
            b"{\"cniVersion\":\"1.0.0\",\"name\":\"\xff\xfe\"}",
            6,
            "column",
        ),
        (
            b"{\"cniVersion\":\"1.0.0\",\"cniVersion\":\"1.0.0\"}",
            6,
            "duplicate field `cniVersion`",
        ),
        (good.as_bytes().get(..good.len() / 2).unwrap(), 6, "EOF"),
        (format!("{good}}}").as_bytes(), 6, "trailing"),
        (long.as_bytes(), 6, "longer than 1048576 bytes"),
        (megabytes.as_bytes(), 6, "longer than 1048576 bytes"),
        (deep(&open).as_bytes(), 6, "column"),
    ] {
        scene.refused_stdin(stdin, code, named);
    }
    // Very deep but valid JSON: an ignored key must not exhaust the stack.
    let nested = deep(&format!("{open}{close}"));
    let variables = scene.add().environment;
    let outcome = Running::start(variables, nested.as_bytes(), &[])
        .unwrap()
        .wait()
        .unwrap();
    assert!([0, 1].contains(&outcome.code), "{outcome:?}");
    if outcome.code == 0 {
        scene.node.until_whole(&scene.pod.spec).unwrap();
        return;
    }
    scene.ends();
}

#[test]
fn a_stdin_of_ten_megabytes_is_refused_in_little_memory_and_time() {
    let scene = Scene::new();
    let stdin = format!("{{\"more\":\"{}\"}}", "x".repeat(10 << 20));
    // Limits address space, including the mapped binary and libraries.
    let mut child = Command::new("prlimit")
        .arg("--as=50000000")
        .arg(bin("inpod-cni").unwrap())
        .env_clear()
        .envs(scene.add().environment)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It does not read everything.
    let unread = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    assert!(unread.is_err());
    let output = child.wait_with_output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer.get("code"), Some(&json!(6)), "{answer}");
    scene.ends();
}

/// Returns keys of standard input with invalid values, and their codes.
fn unusable() -> Vec<(&'static str, Value, u64)> {
    let text = |length| Value::String("x".repeat(length));
    let long_socket = format!("/run/{}", "x".repeat(200));
    let prev_result = [
        json!("10.0.0.1"),
        json!([]),
        json!({"ips": {}}),
        json!({"ips": [{"address": 7}]}),
        json!({"ips": [{"address": "10.0.0.0.1/24"}]}),
        json!({"ips": [{"address": "::ffff:10.77.0.2/112"}]}),
        json!({"ips": [{"address": "fe80::1%eth0/64"}]}),
        json!({"interfaces": [{"name": {}}]}),
    ];
    let timeout = [
        json!(0),
        json!(-1),
        json!(1.5),
        json!("30"),
        json!(601),
        json!(u64::MAX),
    ];
    let socket = [
        json!(7),
        json!("run/inpod.sock"),
        json!(""),
        json!(long_socket),
        json!("/run/\u{0}"),
    ];
    let name = [
        json!(["podnet"]),
        json!(""),
        json!("pod/net"),
        text(300),
        json!("pod\u{0}net"),
    ];
    let attachments = [json!({}), json!([{"containerID": "c"}])];
    let keys: [(&str, u64, &[Value]); 12] = [
        ("cniVersion", 7, &[json!(1)]),
        ("cniVersion", 1, &[json!("1.2.0"), json!("2.0.0")]),
        ("name", 7, &name),
        ("type", 7, &[json!({})]),
        ("prevResult", 7, &prev_result),
        ("agentSocket", 7, &socket),
        ("stateDir", 7, &[json!("plugin"), json!([])]),
        ("timeoutSeconds", 7, &timeout),
        (
            "excludeNamespaces",
            7,
            &[json!("shop"), json!(["Shop!"]), json!([7])],
        ),
        ("agentUnavailable", 7, &[json!("perhaps"), json!(true)]),
        ("logLevel", 7, &[json!("loud")]),
        ("cni.dev/valid-attachments", 7, &attachments),
    ];
    let each = keys
        .into_iter()
        .flat_map(|(key, code, values)| values.iter().map(move |value| (key, value.clone(), code)));
    each.collect()
}

#[test]
fn a_key_of_the_wrong_type_or_value_is_refused_by_its_name() {
    let scene = Scene::new();
    for (key, value, code) in unusable() {
        scene.refused(&scene.add().with_key(key, value), code, key);
    }
    for key in ["name", "type"] {
        scene.refused(&scene.add().without_key(key), 7, key);
    }
    scene.ends();
}

#[test]
fn a_variable_that_cannot_be_used_is_refused_by_its_name() {
    let scene = Scene::new();
    let long = "x".repeat(5000);
    let sixteen = "e".repeat(16);
    for (name, values) in [
        ("CNI_COMMAND", &["", "add", "ADD ", "ADD\n", "\u{7f}"][..]),
        (
            "CNI_CONTAINERID",
            &["", "a/b", "..", "-a", "a b", "a\nb", "ü", &long],
        ),
        (
            "CNI_IFNAME",
            &["", "a/b", "..", ".", "a b", "a\tb", "a:b", &sixteen, &long],
        ),
        ("CNI_NETNS", &["", "run/netns/a", "dummy", &long]),
        (
            "CNI_ARGS",
            &[
                "K8S_POD_NAMESPACE",
                "=;=",
                "IgnoreUnknown=1;;",
                "IgnoreUnknown=2",
                "MAC=0a:00",
                "K8S_POD_NAMESPACE=shop;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a",
                "K8S_POD_NAMESPACE=../shop;K8S_POD_NAME=a",
                "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=A",
                "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a;K8S_POD_UID=a/b",
                "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a\n",
            ],
        ),
    ] {
        for value in values {
            scene.refused(&scene.add().with_var(name, value), 4, name);
        }
    }
    scene.ends();
}

#[test]
fn a_variable_that_is_no_text_is_refused_by_its_name() {
    let scene = Scene::new();
    let call = scene.add();
    for name in ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME", "CNI_ARGS"] {
        let variables = call.environment.iter().map(|(known, value)| {
            let bytes = if known == name {
                b"\xff\xfeK8S_POD_NAME"
            } else {
                value.as_bytes()
            };
            (known, OsStr::from_bytes(bytes))
        });
        let running = Running::start(variables, call.stdin.as_bytes(), &[]).unwrap();
        judge(&running.wait().unwrap(), 4, name, name);
    }
    // A path may contain anything except NUL.
    let variables = call.environment.iter().map(|(known, value)| {
        let bytes = if known == "CNI_NETNS" {
            b"/run/netns/\xff\xfe"
        } else {
            value.as_bytes()
        };
        (known, OsStr::from_bytes(bytes))
    });
    let running = Running::start(variables, call.stdin.as_bytes(), &[]).unwrap();
    judge(&running.wait().unwrap(), 4, "CNI_NETNS", "a path");
    scene.ends();
}

#[test]
fn addresses_that_are_not_the_pods_are_refused() {
    let scene = Scene::new();
    let of = |addresses: Vec<String>| {
        let ips: Vec<_> = addresses
            .iter()
            .map(|address| json!({"address": address}))
            .collect();
        scene
            .add()
            .with_key("prevResult", json!({"cniVersion": "1.0.0", "ips": ips}))
    };
    let many =
        |count: u8| (0..4).flat_map(move |c| (1..=count).map(move |d| format!("10.78.{c}.{d}/16")));
    for addresses in [
        vec![format!("{}/16", scene.victim.v4)],
        vec!["192.0.2.1/32".to_owned()],
        vec!["0.0.0.0/0".to_owned()],
        vec!["255.255.255.255/32".to_owned()],
        many(250).collect(),
    ] {
        scene.refused(&of(addresses), 100, "ADDRESS_MISMATCH");
    }
    // One wrong address of a thousand is enough.
    let right = [format!("{}/16", scene.pod.v4)];
    let outcome = of(many(250).chain(right).collect()).run().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    scene.node.until_whole(&scene.pod.spec).unwrap();
    assert_eq!(
        scene.node.call(Call::del, &scene.pod).run().unwrap().code,
        0
    );
    assert_eq!(scene.node.api().claims().unwrap().len(), 1);
}

#[test]
fn pods_that_are_unknown_of_another_uid_or_of_another_node_are_refused() {
    let scene = Scene::new();
    let named = |name: &str, uid: &str| {
        let args =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID={uid}");
        scene.add().with_var("CNI_ARGS", &args)
    };
    scene.refused(
        &named("nobody", "nobody-0000-1111-2222-333333333333"),
        100,
        "POD_UNKNOWN",
    );
    scene.refused(
        &named("a", "other-0000-1111-2222-333333333333"),
        100,
        "POD_UID_MISMATCH",
    );
    // As a runtime that passes no UID.
    let elsewhere = Spec::new("elsewhere").ambient();
    let manifest = elsewhere.manifest("another-node");
    std::fs::write(scene.node.manifests().join("elsewhere.yaml"), manifest).unwrap();
    scene.refused(&named("elsewhere", ""), 100, "elsewhere");
    scene.ends();
}

#[test]
fn a_del_or_check_of_what_is_not_there_or_not_well_formed_changes_nothing() {
    let scene = Scene::new();
    let del = scene.node.call(Call::del, &scene.pod);
    for call in [
        del.clone(),
        del.clone().with_var("CNI_CONTAINERID", "nobody"),
        del.clone().with_var("CNI_IFNAME", "net1"),
        del.clone().with_key("name", "othernet"),
        del.clone().with_var("CNI_NETNS", "/proc/1/ns/net"),
        del.clone()
            .with_var("CNI_NETNS", &scene.victim.path().display().to_string()),
        // The other pod's name without its sandbox.
        scene
            .node
            .call(Call::del, &scene.victim)
            .with_var("CNI_CONTAINERID", "nobody"),
        scene
            .node
            .call(Call::del, &scene.victim)
            .with_var("CNI_IFNAME", "net1"),
        scene
            .node
            .call(Call::del, &scene.victim)
            .with_key("name", "othernet"),
        del.with_var("CNI_ARGS", "nonsense"),
    ] {
        let outcome = call.run().unwrap();
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (0, ""),
            "{outcome:?}"
        );
    }
    scene.refused(
        &scene.add().with_var("CNI_COMMAND", "CHECK"),
        100,
        "SANDBOX_UNKNOWN",
    );
    let known = scene.node.explain(&scene.victim.spec).unwrap();
    assert_eq!(known.state(), PodState::Enrolled);
    scene.ends();
}
