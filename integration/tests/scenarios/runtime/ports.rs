//! Host ports, over both families.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use inpod_linux::Netns;
use integration::{App, Node, Spec, ask, counters, run};

use crate::runtime::{
    PORT,
    chain::within,
    containerd::Runtime,
    sandboxes::{in_the_mesh, reached_through_ztunnel},
};

/// Returns a machine outside, connected to the node: 192.0.2.2 and 2001:db8::2.
pub(crate) fn outside(node: &Node) -> Netns {
    let name = format!("{}-out", node.name());
    run("ip", &["netns", "add", &name]).unwrap();
    let here = node.netns().path();
    for command in [
        "ip link add wire type veth peer name eth0 netns OUT",
        "ip addr add 192.0.2.1/24 dev wire",
        "ip addr add 2001:db8::1/64 dev wire nodad",
        "ip link set wire up",
        "ip -n OUT addr add 192.0.2.2/24 dev eth0",
        "ip -n OUT addr add 2001:db8::2/64 dev eth0 nodad",
        "ip -n OUT link set eth0 up",
    ] {
        let command = command.replace("OUT", &name);
        within(here, &command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let path = PathBuf::from("/run/netns").join(name);
    Netns::open(&path, &["/run/netns".into()]).unwrap()
}

#[test]
fn a_port_of_the_node_leads_through_ztunnel_to_an_enrolled_pod_in_both_families() {
    let runtime = Runtime::running().unwrap();
    let spec = Spec::new("web").ambient();
    let pod = runtime.pod_at_port(spec, 18080, PORT.into()).unwrap();
    in_the_mesh(&runtime, &pod);
    let _app = App::start(&pod.netns, PORT).unwrap();
    let client = outside(&runtime.node);
    let families: [(&str, &str); 2] = [
        ("192.0.2.1:18080", "192.0.2.2"),
        ("[2001:db8::1]:18080", "2001:db8::2"),
    ];
    for (to, from) in families {
        let to: SocketAddr = to.parse().unwrap();
        let from: IpAddr = from.parse().unwrap();
        let captured = || counters(&pod, "redirect to :15006").unwrap();
        let before = captured();
        // It sees the client, neither node nor ztunnel.
        assert_eq!(reached_through_ztunnel(&runtime, &pod, &client, to), from);
        assert_eq!(captured(), before + 1);
        let accesses = runtime.node.accesses().unwrap();
        let taken = accesses.iter().rfind(|access| access.event == "accepted");
        let source = taken.and_then(|access| access.source).map(|it| it.ip());
        assert_eq!(source, Some(from));
    }
    runtime.end(&pod.container_id).unwrap();
    runtime.until_empty().unwrap();
    for (to, _) in families {
        assert!(ask(&client, to.parse().unwrap()).is_err());
    }
}

#[test]
fn pods_reach_each_other_through_both_ztunnel_ports_in_both_families() {
    let runtime = Runtime::running().unwrap();
    let [client, server] =
        ["client", "server"].map(|name| runtime.pod(Spec::new(name).ambient()).unwrap());
    let _app = App::start(&server.netns, PORT).unwrap();
    for (from, to) in client.addresses().into_iter().zip(server.addresses()) {
        let before = runtime.node.accesses().unwrap().len();
        ask(&client.netns, SocketAddr::new(to, PORT)).unwrap();
        let accesses = runtime.node.accesses().unwrap();
        let taken = accesses
            .iter()
            .skip(before)
            .filter(|it| it.event == "accepted");
        let taken: Vec<_> = taken.map(|it| (it.uid.as_str(), it.listener)).collect();
        let left = (client.spec.uid.as_str(), 15001);
        assert!(taken.contains(&left), "{from} {taken:?}");
        assert!(
            taken
                .iter()
                .any(|(uid, port)| *uid == server.spec.uid && *port != 15001),
            "{taken:?}"
        );
    }
    for pod in [client, server] {
        runtime.end(&pod.container_id).unwrap();
    }
    runtime.until_empty().unwrap();
}
