//! Concurrent nodes, each with its own network, pid, mount, ipc and uts namespaces, /run, containerd, chain, services
//! and ztunnel: this program again, following commands on standard input.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _, stdin},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use integration::{App, Pod, SERVICES, Spec, connect, exchange, source_seen};
use nix::sys::signal::Signal;

use crate::{
    PORT,
    runtime::{Runtime, end},
};

/// Marks a process as a node.
const ROLE: &str = "INPOD_TEST_NODE_IS_DIRECTED";

/// The test that runs as node.
const NODE: &str = "nodes::a_node_follows_its_commands_and_ends_empty";

/// Marks answers among libtest's output.
const ANSWER: &str = "node: ";

/// A node and what was created on it.
struct Inside {
    apps: Vec<App>,
    pods: BTreeMap<String, Pod>,
    outsider: Pod,
    stream: Option<TcpStream>,
    runtime: Runtime,
}

impl Inside {
    fn running() -> anyhow::Result<Self> {
        let runtime = Runtime::running()?;
        Ok(Self {
            apps: Vec::new(),
            pods: BTreeMap::new(),
            outsider: runtime.node.sandbox(Spec::new("outsider"))?,
            stream: None,
            runtime,
        })
    }

    /// Returns its result in one line.
    fn execute_command(&mut self, order: &str) -> anyhow::Result<String> {
        let words: Vec<_> = order.split(' ').collect();
        match *words {
            ["run", name, uid] => self.run(name, uid),
            ["open", name] => self.open(name),
            ["speak"] => {
                let stream = self.stream.as_mut().context("nothing is open")?;
                exchange(stream, "still here").map(|()| String::new())
            }
            ["kill", service] => {
                self.runtime.node.stop(service, Signal::SIGKILL)?;
                Ok(String::new())
            }
            ["start", service] => self.runtime.node.start(service).map(|()| String::new()),
            ["whole"] => self.whole(),
            ["pids"] => self.pids(),
            ["state"] => self.state(),
            ["end"] => self.end(),
            _ => bail!("no order: {order:?}"),
        }
    }

    fn run(&mut self, name: &str, uid: &str) -> anyhow::Result<String> {
        let uid = uid.to_owned();
        let spec = Spec {
            uid,
            ..Spec::new(name).ambient()
        };
        let pod = self.runtime.pod(spec)?;
        self.apps.push(App::start(&pod.netns, PORT)?);
        let address = pod.v4.to_string();
        self.pods.insert(name.to_owned(), pod);
        Ok(address)
    }

    /// Connects to a pod through its ztunnel, and stays connected.
    fn open(&mut self, name: &str) -> anyhow::Result<String> {
        let pod = self.pods.get(name).context("no such pod")?;
        let node = &self.runtime.node;
        let before = node.accesses()?.len();
        let stream = connect(&self.outsider.netns, SocketAddr::new(pod.v4.into(), PORT))?;
        let (_, stream) = source_seen(stream)?;
        self.stream = Some(stream);
        let accesses = node.accesses()?;
        let mut taken = accesses.iter().skip(before);
        ensure!(
            taken.any(|access| access.uid == pod.spec.uid && access.listener == 15006),
            "not captured"
        );
        Ok(String::new())
    }

    fn whole(&self) -> anyhow::Result<String> {
        self.runtime.node.ready()?;
        for pod in self.pods.values() {
            self.runtime.node.until_whole(&pod.spec)?;
        }
        Ok(String::new())
    }

    fn pids(&self) -> anyhow::Result<String> {
        let processes = SERVICES.into_iter().chain(["ztunnel"]);
        let pids = processes.map(|name| self.runtime.node.pid(name));
        Ok(format!("{:?}", pids.collect::<Result<Vec<_>, _>>()?))
    }

    /// Everything that the node's processes know of any pod, and every netns.
    fn state(&self) -> anyhow::Result<String> {
        let node = &self.runtime.node;
        let (claims, workloads) = (node.api().claims()?, node.api().workloads()?.workloads);
        let listed = node
            .api()
            .list(inpod_proto::podevents::v1::ListPodsRequest::default())?;
        let workloads: Vec<_> = workloads
            .into_iter()
            .map(|status| status.workload)
            .collect();
        let sandboxes: Vec<_> = self
            .runtime
            .cri
            .sandboxes()?
            .into_iter()
            .map(|it| it.metadata)
            .collect();
        let netns = std::fs::read_dir("/run/netns")?.count();
        let ztunnel = node.ztunnel_state()?;
        Ok(
            format!("{claims:?} {workloads:?} {listed:?} {sandboxes:?} {ztunnel} {netns} netns")
                .replace('\n', " "),
        )
    }

    fn end(&mut self) -> anyhow::Result<String> {
        (self.stream, self.apps) = (None, Vec::new());
        for pod in std::mem::take(&mut self.pods).into_values() {
            self.runtime.end(&pod.container_id)?;
        }
        self.outsider.unmount()?;
        Ok(String::new())
    }
}

#[test]
fn a_node_follows_its_commands_and_ends_empty() {
    let mut node = Inside::running().unwrap();
    let uid = "web-0000-1111-2222-333333333333";
    if std::env::var_os(ROLE).is_some() {
        // libtest may have printed on this line.
        println!("\n{ANSWER}ok");
        for order in stdin().lines() {
            match node.execute_command(&order.unwrap()) {
                Ok(answer) => println!("{ANSWER}ok {answer}"),
                Err(error) => println!("{ANSWER}no {error:#}"),
            }
        }
    } else {
        for order in [
            &format!("run web {uid}")[..],
            "open web",
            "kill pod-events",
            "speak",
            "start pod-events",
            "whole",
        ] {
            node.execute_command(order).unwrap();
        }
        assert!(node.execute_command("state").unwrap().contains(uid));
        assert!(node.execute_command("fly").is_err());
        node.execute_command("end").unwrap();
    }
    let Inside {
        outsider, runtime, ..
    } = node;
    drop(outsider);
    runtime.until_empty().unwrap();
}

/// A node as the test sees it.
struct Outside {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Outside {
    fn start() -> Self {
        let isolate = Path::new(env!("CARGO_MANIFEST_DIR")).join("isolate");
        let mut command = Command::new(isolate);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", NODE, "--nocapture", "--test-threads=1"]);
        command
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        Self {
            orders: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
        }
    }

    /// An ended node answers nothing.
    fn answer(&mut self) -> anyhow::Result<String> {
        loop {
            let mut line = String::new();
            ensure!(self.answers.read_line(&mut line)? > 0, "the node has ended");
            if let Some(answer) = line.trim_end().strip_prefix(ANSWER) {
                let answer = answer.to_owned();
                ensure!(answer.starts_with("ok"), "{answer}");
                return Ok(answer.trim_start_matches("ok").trim().to_owned());
            }
        }
    }

    fn send(&mut self, order: &str) -> String {
        let mut orders = self.orders.as_ref().unwrap();
        writeln!(orders, "{order}").unwrap();
        self.answer().with_context(|| order.to_owned()).unwrap()
    }

    /// Ends the node and expects success.
    fn end(mut self) {
        self.send("end");
        self.orders = None;
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

fn nodes<const N: usize>() -> [Outside; N] {
    let mut nodes = [(); N].map(|()| Outside::start());
    for node in &mut nodes {
        node.answer().unwrap();
    }
    nodes
}

/// Returns the UID of a pod of a node.
fn uid(node: usize, number: usize) -> String {
    format!("11111111-2222-4333-8444-5555555{node:01x}{number:04x}")
}

#[test]
fn pods_of_two_nodes_that_have_the_same_names_and_addresses_do_not_see_each_others_state() {
    let mut nodes = nodes::<2>();
    let mut addresses = Vec::new();
    for (index, node) in nodes.iter_mut().enumerate() {
        let run = |number| format!("run web-{number} {}", uid(index, number));
        let own: Vec<_> = (0..2).map(|number| node.send(&run(number))).collect();
        node.send("open web-0");
        addresses.push(own);
    }
    // Only their UIDs and sandboxes differ.
    assert_eq!(addresses.first(), addresses.get(1));
    for (index, node) in nodes.iter_mut().enumerate() {
        node.send("whole");
        let state = node.send("state");
        for number in 0..2 {
            assert!(state.contains(&uid(index, number)), "{state}");
            assert!(!state.contains(&uid(1 - index, number)), "{state}");
        }
        // The node's, two pods' and the outsider's.
        assert!(state.ends_with(" 4 netns"), "{state}");
    }
    nodes.into_iter().for_each(Outside::end);
}

#[test]
fn while_one_nodes_agent_is_killed_and_comes_back_the_pods_of_the_others_go_on() {
    let mut nodes = nodes::<3>();
    for (index, node) in nodes.iter_mut().enumerate() {
        node.send(&format!("run web {}", uid(index, 0)));
        node.send("open web");
    }
    let [first, others @ ..] = &mut nodes;
    let before: Vec<_> = others
        .iter_mut()
        .map(|node| (node.send("state"), node.send("pids")))
        .collect();
    for service in SERVICES {
        first.send(&format!("kill {service}"));
    }
    // Its own pod's connection continues: it is ztunnel's.
    first.send("speak");
    let during: Vec<_> = others
        .iter_mut()
        .map(|node| (node.send("state"), node.send("pids")))
        .collect();
    assert_eq!(during, before);
    for (index, node) in others.iter_mut().enumerate() {
        node.send("speak");
        node.send(&format!("run new {}", uid(index + 1, 1)));
        node.send("open new");
    }
    for service in SERVICES {
        first.send(&format!("start {service}"));
    }
    for node in &mut nodes {
        node.send("whole");
        node.send("speak");
    }
    nodes.into_iter().for_each(Outside::end);
}
