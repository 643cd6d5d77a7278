//! Nodes with different pod networks and modes of kube-proxy, with the reference ztunnel.

use std::{fs, net::SocketAddr, process::Output};

use anyhow::ensure;
use integration::{
    TIMEOUT, eventually,
    kubernetes::{Chain, Machine, get, text},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    cluster::{
        agent::{AGENT, ExclusiveCluster, SYSTEM, named, uid},
        apps::{PORT, address, container},
        probes::{PROBE, seen},
    },
    mesh::{
        apps::{App, make_ambient, netns_of, until_enrolled},
        control::on_every_network,
    },
};

/// The port of each node that leads to the node's pod.
const HOST_PORT: u16 = 18080;

/// Returns the types of the plugins that the runtime calls for a pod.
fn chain(machine: &Machine) -> Vec<String> {
    let list = fs::read_to_string(machine.etc("cni/net.d/02-inpod.conflist").unwrap()).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let plugins = list.pointer("/plugins").and_then(Value::as_array).unwrap();
    let kind = |plugin: &Value| text(plugin, "/type").to_owned();
    plugins.iter().map(kind).collect()
}

/// Deploys a pod on each node, with a port of the node that leads to the pod.
fn one_on_each<'a>(cluster: &'a ExclusiveCluster<'a>, names: &'a [String]) -> Vec<App<'a>> {
    let more = json!({
        "ports": [{"containerPort": PORT, "hostPort": HOST_PORT}],
        "readinessProbe": {"httpGet": {"path": "/cgi-bin/who", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5},
    });
    let container = container(&more);
    let deploy = |(machine, name): (&'a Machine, &'a String)| {
        App::deploy_with(cluster, ("nodes", name), Some(machine), 1, &container)
    };
    cluster.machines().iter().zip(names).map(deploy).collect()
}

#[test]
fn pods_of_every_network_reach_each_other_through_ztunnels() {
    on_every_network(|cluster| {
        make_ambient(cluster, "nodes");
        let names: Vec<_> = cluster
            .machines()
            .iter()
            .map(|machine| machine.node.name())
            .collect();
        let apps = one_on_each(cluster, &names);
        let pods: Vec<_> = apps.iter().map(App::pod).collect();
        until_enrolled(cluster, &pods);
        for machine in cluster.machines() {
            let plugins = chain(machine);
            assert_eq!(
                plugins.last().map(String::as_str),
                Some("inpod-cni"),
                "{plugins:?}"
            );
        }
        for from in &pods {
            // A pod reaches itself past ztunnel.
            for (app, to) in apps.iter().zip(&pods).filter(|(_, to)| *to != from) {
                reaches_through_ztunnels(cluster, from, app, to);
            }
        }
        // From outside of the cluster, by the node's address.
        for (app, pod) in apps.iter().zip(&pods) {
            let ip = text(pod, "/status/hostIP");
            for port in [app.node_port(), HOST_PORT] {
                let to: SocketAddr = format!("{ip}:{port}").parse().unwrap();
                assert_eq!(get(&cluster.outside, to).unwrap().trim(), "here", "{to}");
            }
            // Probes pass ztunnel.
            eventually("probes come from their own address", TIMEOUT, || {
                let clients = seen(cluster, pod)?;
                let is_probe = |client: &&String| client.contains(PROBE);
                let probes = clients.iter().filter(is_probe).count();
                ensure!(probes > 5, "{clients:?}");
                anyhow::Ok(())
            })
            .unwrap();
        }
        cluster.remove("nodes");
    });
}

/// Expects that a pod reaches another by each of its addresses, through both pods' ztunnels.
fn reaches_through_ztunnels(
    cluster: &ExclusiveCluster<'_>,
    from: &Value,
    app: &App<'_>,
    to: &Value,
) {
    let netns = netns_of(cluster, from);
    let ends = [(from, 15001), (to, 15006)];
    let count = || ends.map(|(pod, port)| accepted(cluster.machine_of(pod), pod, port));
    let at_node = |port| -> SocketAddr {
        format!("{}:{port}", text(to, "/status/hostIP"))
            .parse()
            .unwrap()
    };
    for address in [
        address(to),
        app.virtual_address(),
        at_node(app.node_port()),
        at_node(HOST_PORT),
    ] {
        // kube-proxy of this node may not know the Service yet.
        eventually("the address leads to the pod", TIMEOUT, || {
            get(&netns, address)
        })
        .unwrap();
        let before = count();
        assert_eq!(get(&netns, address).unwrap().trim(), "here");
        assert_eq!(count(), before.map(|count| count + 1), "{address}");
    }
}

/// Counts connections that a ztunnel accepted in a pod on a port.
fn accepted(machine: &Machine, pod: &Value, listener: u64) -> usize {
    let all = machine.accesses().unwrap();
    let is_meant = |access: &&integration::Access| {
        access.event == "accepted" && access.uid == uid(pod) && access.listener == listener
    };
    all.iter().filter(is_meant).count()
}

#[test]
fn istiod_removes_the_taint_of_a_node_once_its_agent_is_ready() {
    on_every_network(|cluster| {
        let machine = cluster.machines().last().unwrap();
        assert_eq!(machine.node.chain, Chain::Flannel);
        let path = format!("/api/v1/nodes/{}", machine.node.name());
        let taint = "cni.istio.io/not-ready";
        let tainted = || {
            let node = cluster.server.get(&path)?;
            let taints = node
                .pointer("/spec/taints")
                .unwrap_or(&Value::Null)
                .to_string();
            anyhow::Ok(taints.contains(taint))
        };
        // A node without an agent keeps the taint: the agent's pods are kept off it.
        let agent_path = "/apis/apps/v1/namespaces/inpod-system/daemonsets/inpod";
        let elsewhere = json!({"spec": {"template": {"spec": {"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [machine.node.name()]}]}]}}}}}}});
        cluster.server.patch(agent_path, &elsewhere).unwrap();
        let nodes = cluster.machines().len();
        cluster.until_rolled(nodes - 1);
        let add = json!({"spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}});
        cluster.server.patch(&path, &add).unwrap();
        std::thread::sleep(std::time::Duration::from_secs(5));
        assert!(tainted().unwrap(), "removed without an agent");
        let everywhere = json!({"spec": {"template": {"spec": {"affinity": null}}}});
        cluster.server.patch(agent_path, &everywhere).unwrap();
        eventually("the taint is gone", TIMEOUT * 4, || {
            ensure!(!tainted()?, "it is there");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.until_rolled(nodes);
        cluster.until_whole();
    });
}

#[test]
fn binds_names_the_services_of_pods_on_every_node() {
    on_every_network(|cluster| {
        cluster.make_namespace("binds", &json!({})).unwrap();
        let machines = cluster.machines();
        let names: Vec<_> = machines.iter().map(|it| it.node.name()).collect();
        let apps = machines.iter().zip(&names);
        let apps =
            apps.map(|(machine, name)| App::deploy(cluster, "binds", name, Some(machine), 1));
        let apps: Vec<_> = apps.collect();
        let pods: Vec<_> = apps.iter().map(App::pod).collect();
        let ports: Vec<_> = names.iter().zip(&pods).collect();
        let binds = |timeout| {
            let arguments = ["binds", "--services", "-n", "binds", "--timeout", timeout];
            cluster.kubectl_inpod(&arguments)
        };
        eventually("every node names its Service", TIMEOUT, || {
            let output = binds("20");
            ensure!(output.status.success(), "{output:?}");
            for (node, pod) in &ports {
                ensure!(names_port(&output, node, pod), "{node}: {output:?}");
            }
            anyhow::Ok(())
        })
        .unwrap();

        let (silent, others) = ports.split_last().unwrap();
        let agents = cluster.until_ready(SYSTEM, AGENT, machines.len()).unwrap();
        let is_silent = |pod: &&Value| text(pod, "/spec/nodeName") == silent.0;
        let agent = agents.iter().find(is_silent).unwrap();
        let signal = |signal| {
            let machine = cluster.machine_of(agent);
            machine.kill(uid(agent), "/pod-events", signal).unwrap();
        };
        signal(Signal::SIGSTOP);
        let output = binds("10");
        signal(Signal::SIGCONT);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let start = format!("{}: inpod: cannot reach pod-events", silent.0);
        assert!(errors.starts_with(&start), "{errors}");
        assert!(!names_port(&output, silent.0, silent.1), "{output:?}");
        for (node, pod) in others {
            assert!(names_port(&output, node, pod), "{node}: {output:?}");
        }
        cluster.remove("binds");
    });
}

/// Returns whether a row names the node, the pod, the application's port and the Service, which is named like the node.
fn names_port(output: &Output, node: &str, pod: &Value) -> bool {
    let (namespace, name) = named(pod);
    let start = format!("{node} {namespace} {name} {PORT}/TCP service {node} wildcard ");
    String::from_utf8_lossy(&output.stdout).lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.join(" ").starts_with(&start)
    })
}
