//! What inpod promises, held by the programs of its images with the settings that its chart renders: peers and ztunnels
//! are identified by their pods, DNS is captured, every pod has a process.

mod away;
mod ends;
mod full;
mod names;
mod peers;
mod restarts;
mod restored;
mod running;
mod stacks;
mod traffic;

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{ApiServer, DeployedNode, Inhabitant, Mesh, Node, Pod, TIMEOUT, ask, eventually};

const MANIFEST: &str = include_str!("../../../../deploy/manifests/combined.yaml");

const PORT: u16 = 8080;

const NOTHING: Vec<String> = Vec::new();

/// Returns the directory of the images' programs.
fn programs() -> PathBuf {
    let directory = std::env::var_os("IMAGE_BINARIES").map(PathBuf::from);
    let missing =
        "IMAGE_BINARIES names the directory of static binaries: run ./integration/test apiserver";
    directory.context(missing).unwrap()
}

/// Prepares a node; nothing runs yet.
fn stopped() -> DeployedNode {
    let server = ApiServer::shared().unwrap();
    let node = Node::of_cluster(&server).unwrap();
    DeployedNode::new(&server, node, &programs(), MANIFEST).unwrap()
}

fn running() -> DeployedNode {
    let deployed = stopped();
    deployed.start_ztunnel().unwrap();
    deployed.start_services().unwrap();
    deployed.node.ready().unwrap();
    deployed
}

/// A pod with a process.
struct Living {
    pod: Pod,
    process: Inhabitant,
}

/// Starts pods as a kubelet does: the sandbox and its ADD, a process in it, then the status.
fn start<const N: usize>(deployed: &DeployedNode, meshes: [Mesh; N]) -> [Living; N] {
    let pods = deployed.sandboxes(&meshes).unwrap();
    for pod in &pods {
        deployed.add(pod).unwrap();
    }
    let living: Vec<_> = inhabited(deployed, pods).collect();
    living.try_into().ok().unwrap()
}

fn inhabited(deployed: &DeployedNode, pods: Vec<Pod>) -> impl Iterator<Item = Living> {
    let processes = deployed.inhabitants(&pods).unwrap();
    let living = pods.into_iter().zip(processes);
    living.map(|(pod, process)| Living { pod, process })
}

/// Returns a new connection's path: the pods and ports of the listeners that accepted it, and the source that the
/// application saw.
fn follow(deployed: &DeployedNode, from: &Netns, to: SocketAddr) -> (Vec<(String, u64)>, String) {
    let before = deployed.node.accesses().unwrap().len();
    let source = ask(from, to);
    let all = deployed.node.accesses().unwrap().split_off(before);
    let source = source.with_context(|| format!("to {to} by {all:?}"));
    let accepted = all.into_iter().filter(|it| it.event == "accepted");
    let path = accepted.map(|access| (access.uid, access.listener));
    (path.collect(), source.unwrap().to_string())
}

/// Expects new connections from a pod to another to be accepted at these ports, over both families, and to keep their
/// source.
fn assert_path(deployed: &DeployedNode, from: &Pod, to: &Pod, ports: &[(&Pod, u64)]) {
    let wanted = ports
        .iter()
        .map(|(pod, port)| (pod.spec.uid.clone(), *port));
    let wanted: Vec<_> = wanted.collect();
    for (source, address) in from.addresses().into_iter().zip(to.addresses()) {
        let found = follow(deployed, &from.netns, SocketAddr::new(address, PORT));
        assert_eq!(found, (wanted.clone(), source.to_string()), "to {address}");
    }
}

fn until_enrolled(deployed: &DeployedNode, count: usize) {
    eventually("every pod is enrolled", TIMEOUT, || {
        let listed = deployed.node.api().list(ListPodsRequest::default())?;
        let enrolled = listed.iter().filter(|it| it.state() == PodState::Enrolled);
        let enrolled = enrolled.count();
        ensure!(enrolled == count, "{enrolled} of {count} are");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Returns a pod's tables without their counters, sorted: the kernel lists the one that was created last at the end.
fn rules(pod: &Pod) -> Vec<String> {
    let ruleset = pod.exec(&["nft", "-s", "list", "ruleset"]).unwrap();
    let mut tables: Vec<_> = ruleset.split("\n}\n").map(str::to_owned).collect();
    tables.sort();
    tables
}
