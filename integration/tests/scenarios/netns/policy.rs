//! Network policies of the primary CNI plugin beside inpod. A filter in the node's network namespace stands for an engine
//! of iptables or nf_tables, and a program at tc for a plugin in eBPF. Both are on the node's side of the pods' veths.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
};

use crate::common::{
    mesh::{Mesh, PORT},
    policy_table::{self, Row},
};
use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::PodState;
use integration::{Pod, Spec, TIMEOUT, ask, counted, eventually, not_run, run};
use nix::sys::signal::Signal;

const HBONE: u16 = 15008;

/// The addresses of the node on the bridge of the pods.
const NODE: [&str; 2] = ["10.77.0.1", "fd77::1"];

/// A program at tc that drops IPv4 packets from and to 169.254.0.0/16, in the form of `tc filter ... bpf bytecode`: it
/// compares the EtherType and the upper halves of both addresses, and returns TC_ACT_SHOT or TC_ACT_UNSPEC.
const DROP_LINK_LOCAL: &str = "8,40 0 0 12,21 0 5 2048,40 0 0 26,21 2 0 43518,40 0 0 30,21 0 1 43518,6 0 0 2,6 0 0 4294967295";

/// An entry of a policy, which admits TCP connections.
#[derive(Clone, Debug)]
struct Entry {
    /// `ingress` or `egress`, from the view of the selected pod.
    direction: &'static str,
    peers: Vec<IpAddr>,
    port: u16,
}

impl Entry {
    fn new(direction: &'static str, peers: &[IpAddr], port: u16) -> Self {
        Self {
            direction,
            peers: peers.to_vec(),
            port,
        }
    }

    fn rules(&self) -> String {
        let side = if self.direction == "ingress" {
            "saddr"
        } else {
            "daddr"
        };
        let rule = |peer: &IpAddr| {
            let (family, port) = (family(*peer), self.port);
            format!("{family} {side} {peer} tcp dport {port} counter return; ")
        };
        self.peers.iter().map(rule).collect()
    }
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

/// Returns the table of an engine that denies the selected pods everything but replies and the entries. The hook
/// `postrouting` sees the packets of the node as well as the packets between two ports of the bridge. The chain `before`
/// only counts the node's packets before source NAT.
fn table(selected: &[&Pod], entries: &[Entry]) -> String {
    let chain = |direction| {
        let entries = entries.iter().filter(|it| it.direction == direction);
        let rules: String = entries.map(Entry::rules).collect();
        format!("chain {direction} {{ {rules}counter drop; }};")
    };
    let select = |address: IpAddr| {
        let family = family(address);
        format!("{family} saddr {address} jump egress; {family} daddr {address} jump ingress; ")
    };
    let select: String = selected
        .iter()
        .flat_map(|pod| pod.addresses())
        .map(select)
        .collect();
    let (ingress, egress, [v4, v6]) = (chain("ingress"), chain("egress"), NODE);
    format!(
        "add table inet network-policy; delete table inet network-policy; table inet network-policy {{ {ingress} {egress} \
         chain before {{ type filter hook output priority 0; \
         ip saddr {v4} tcp dport {PORT} counter; ip6 saddr {v6} tcp dport {PORT} counter; }}; \
         chain engine {{ type filter hook postrouting priority 200; \
         ct state established,related accept; meta l4proto ipv6-icmp accept; {select}}}; }}"
    )
}

struct Place {
    mesh: Mesh,
}

impl Place {
    /// Creates two pods in the mesh, of which b has a probe, and one outside, without a policy. Returns `None` where the
    /// filter would not see packets between two ports of a bridge.
    fn new() -> Option<Self> {
        if !Path::new("/proc/sys/net/bridge").exists() {
            not_run("the kernel module br_netfilter is not loaded");
            return None;
        }
        let mut b = Spec::new("b").ambient();
        let probe = format!("readinessProbe: {{tcpSocket: {{port: {PORT}}}}}");
        b.containers
            .push(format!("{{name: probed, image: app, {probe}}}"));
        let mesh = Mesh::by_hbone_with(b).unwrap();
        let place = Self { mesh };
        for name in ["iptables", "ip6tables"] {
            let setting = format!("net.bridge.bridge-nf-call-{name}=1");
            place.on_node(&["sysctl", "-qw", &setting]);
        }
        place.mesh.a_reaches_b_by(HBONE.into()).unwrap();
        Some(place)
    }

    fn on_node(&self, command: &[&str]) -> String {
        let netns = format!("--net={}", self.mesh.node.netns().path().display());
        run("nsenter", &[&[netns.as_str()][..], command].concat()).unwrap()
    }

    fn enforce(&self, selected: &[&Pod], entries: &[Entry]) {
        self.on_node(&["nft", &table(selected, entries)]);
    }

    /// Returns the number of packets that the engine's rules containing `rule` have counted.
    fn counted(&self, rule: &str) -> u64 {
        let table = self.on_node(&["nft", "list", "table", "inet", "network-policy"]);
        counted(&table, rule)
    }

    fn members(&self) -> Vec<IpAddr> {
        let pods = [&self.mesh.a, &self.mesh.b];
        pods.iter().flat_map(|pod| pod.addresses()).collect()
    }

    /// Returns both directions with the pods of the mesh at a port.
    fn among_members(&self, port: u16) -> [Entry; 2] {
        ["ingress", "egress"].map(|direction| Entry::new(direction, &self.members(), port))
    }

    /// Returns the entries that the page demands.
    fn demanded(&self) -> Vec<Entry> {
        let entry = |row: Row| {
            let peers = row
                .peer
                .map_or_else(|| self.members(), |address| vec![address]);
            Entry::new(row.direction, &peers, row.port.unwrap_or(PORT))
        };
        policy_table::rows().into_iter().map(entry).collect()
    }

    /// Expects that no call of a reaches b, on whatever path: ztunnel gives up to open a tunnel.
    fn a_is_denied(&self) {
        let Mesh { a, b, node, .. } = &self.mesh;
        let before = node.accesses().unwrap().len();
        let answers = ask_both(a, b);
        assert!(answers.iter().all(Result::is_err), "{answers:?}");
        let new = eventually("ztunnel gives up", TIMEOUT, || {
            let new = node.accesses()?.split_off(before);
            let is_closed = new.iter().filter(|it| it.event == "closed").count() == 2;
            ensure!(is_closed, "{new:?}");
            anyhow::Ok(new)
        })
        .unwrap();
        for access in &new {
            assert_eq!((&access.uid, access.listener), (&a.spec.uid, 15001));
            let error = access.error.as_deref().unwrap_or_default();
            assert!(
                access.event != "closed" || error.contains(":15008: "),
                "{access:?}"
            );
        }
    }

    /// Returns the results of two calls and two probes, in the order of the rows of the page's table.
    fn results(&self) -> [anyhow::Result<()>; 4] {
        let Mesh { a, b, node, .. } = &self.mesh;
        let netns = node.netns();
        let call = |from: &Pod, to: &Pod| {
            for (answer, source) in ask_both(from, to).into_iter().zip(from.addresses()) {
                ensure!(answer? == source, "the application did not see {source}");
            }
            Ok(())
        };
        let probe = |to: IpAddr| ask(netns, SocketAddr::new(to, PORT)).map(drop);
        thread::scope(|scope| {
            let calls = [(a, b), (b, a)].map(|(from, to)| scope.spawn(move || call(from, to)));
            let probes = b.addresses().map(|to| scope.spawn(move || probe(to)));
            let ([there, back], [v4, v6]) = (calls, probes);
            [there, back, v4, v6].map(|thread| thread.join().unwrap())
        })
    }

    /// Expects that a probe reaches b from a source, past ztunnel or by a listener of ztunnel.
    fn probed_from(&self, source: &str, to: IpAddr, listener: Option<u64>) -> anyhow::Result<()> {
        let Mesh { b, node, .. } = &self.mesh;
        let (seen, taken) = self.mesh.follow(node.netns(), SocketAddr::new(to, PORT))?;
        ensure!(seen == source.parse::<IpAddr>()?, "from {seen}");
        let uid = b.spec.uid.as_str();
        let wanted: Vec<_> = listener.iter().map(|it| (uid, *it)).collect();
        ensure!(Mesh::path(&taken) == wanted, "by {taken:?}");
        Ok(())
    }

    /// Restarts netconfig, and waits until the rules of b follow its settings.
    fn configure(&self, settings: &[&str]) {
        let node = &self.mesh.node;
        node.stop("netconfig", Signal::SIGTERM).unwrap();
        let settings = [&["--peer", "uid"][..], settings].concat();
        node.start_with("netconfig", &settings).unwrap();
        node.ready().unwrap();
        node.until_whole(&self.mesh.b.spec).unwrap();
    }
}

/// Asks the application of a pod by IPv4 and IPv6 at once; returns the sources that the application saw.
fn ask_both(from: &Pod, to: &Pod) -> [anyhow::Result<IpAddr>; 2] {
    thread::scope(|scope| {
        to.addresses()
            .map(|address| scope.spawn(move || ask(&from.netns, SocketAddr::new(address, PORT))))
            .map(|thread| thread.join().unwrap())
    })
}

#[test]
fn policy_without_entries_denies_enrolled_pods() {
    let Some(place) = Place::new() else { return };
    place.enforce(&[&place.mesh.b], &[]);
    place.a_is_denied();
    assert!(place.counted("drop") > 0);
    place.mesh.reached_from_outside().unwrap_err();
}

#[test]
fn policy_without_15008_fails_hbone_and_nothing_bypasses_it() {
    let Some(place) = Place::new() else { return };
    let entries = place.among_members(PORT);
    place.enforce(&[&place.mesh.a, &place.mesh.b], &entries);
    place.a_is_denied();
    let admitted = format!("tcp dport {PORT} counter");

    assert_eq!(place.counted(&admitted), 0, "plaintext passed");
    // A pod outside of the mesh is the negative control: the same entries admit plaintext.
    let plain = Entry::new("ingress", &place.mesh.outsider.addresses(), PORT);
    place.enforce(&[&place.mesh.b], &[plain]);
    place.mesh.reached_from_outside().unwrap();
    assert_eq!(place.counted(&admitted), 2);
}

#[test]
fn policy_with_15008_admits_hbone_and_only_hbone() {
    let Some(place) = Place::new() else { return };
    let entries = place.among_members(HBONE);
    place.enforce(&[&place.mesh.a, &place.mesh.b], &entries);
    place.mesh.a_reaches_b_by(HBONE.into()).unwrap();
    // The first packet of a connection by each family passes egress of a and ingress of b.
    assert_eq!(place.counted("tcp dport 15008"), 4);
    assert_eq!(place.counted("drop"), 0);
    place.mesh.reached_from_outside().unwrap_err();
    assert!(place.counted("drop") > 0);
}

#[test]
fn policy_sees_probes_after_source_nat_from_their_source() {
    let Some(place) = Place::new() else { return };
    let Mesh { b, outsider, .. } = &place.mesh;
    let probes: Vec<_> = place.demanded().split_off(2);
    place.enforce(&[b], &probes);
    for (entry, to) in probes.iter().zip(b.addresses()) {
        let source = entry.peers[0].to_string();
        place.probed_from(&source, to, None).unwrap();
        assert_eq!(place.counted(&format!("saddr {source} tcp")), 1);
    }
    for source in NODE {
        // The hook `output` comes before source NAT.
        assert!(place.counted(&format!("saddr {source} tcp")) > 0);
    }
    // An entry for the node admits probes only where the pod is outside of the mesh.
    let node = Entry::new("ingress", &NODE.map(|it| it.parse().unwrap()), PORT);
    place.enforce(&[b, outsider], &[node]);
    for (to, source) in outsider.addresses().into_iter().zip(NODE) {
        place.probed_from(source, to, None).unwrap();
    }
    for result in place.results().into_iter().skip(2) {
        result.unwrap_err();
    }
}

#[test]
fn policy_of_the_install_page_suffices_and_needs_each_entry() {
    let Some(place) = Place::new() else { return };
    let (demanded, b) = (place.demanded(), &place.mesh.b);
    assert_eq!(demanded.len(), 4, "{demanded:?}");
    place.enforce(&[b], &demanded);
    place.results().into_iter().for_each(Result::unwrap);
    for missing in 0..demanded.len() {
        let mut entries = demanded.clone();
        let entry = entries.remove(missing);
        place.enforce(&[b], &entries);
        let results = place.results();
        for (index, result) in results.iter().enumerate() {
            let fails = result.is_err();
            assert_eq!(fails, index == missing, "without {entry:?}: {results:?}");
        }
    }
}

#[test]
fn policy_applies_to_a_pod_that_left_the_mesh_as_before() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let entries = place.among_members(PORT);
    place.enforce(&[&place.mesh.b], &entries);
    place.a_is_denied();
    place.mesh.b.spec.mode = None;
    let Mesh { a, b, node, .. } = &place.mesh;
    node.write_manifest(&b.spec).unwrap();
    node.until(&b.spec, PodState::Out, TIMEOUT).unwrap();
    place.mesh.a_reaches_in_plaintext(b).unwrap();
    place.enforce(&[b], &place.among_members(HBONE));
    let answers = ask_both(a, b);
    assert!(answers.iter().all(Result::is_err), "{answers:?}");
}

/// A probe of the default source is the negative control.
#[test]
fn tc_that_drops_link_local_passes_hbone_and_chosen_probes() {
    let Some(place) = Place::new() else { return };
    let Mesh { b, .. } = &place.mesh;
    let [v4, v6] = b.addresses();
    place.probed_from("169.254.7.127", v4, None).unwrap();
    place.on_node(&["tc", "qdisc", "add", "dev", &b.veth, "clsact"]);
    for direction in ["ingress", "egress"] {
        let filter = ["tc", "filter", "add", "dev", &b.veth, direction];
        let program = ["bpf", "da", "bytecode", DROP_LINK_LOCAL];
        place.on_node(&[&filter[..], &program].concat());
    }
    let unaffected = || {
        place.mesh.a_reaches_b_by(HBONE.into()).unwrap();
        place.mesh.reached_from_outside().unwrap();
        ask(place.mesh.node.netns(), SocketAddr::new(v6, PORT)).unwrap();
    };
    let failed = place.probed_from("169.254.7.127", v4, None);
    failed.context("the probe").unwrap_err();
    unaffected();
    place.configure(&["--probe-source-v4", "198.18.7.127"]);
    place.probed_from("198.18.7.127", v4, None).unwrap();
    unaffected();
    place.configure(&["--probe-match", "off"]);
    place.probed_from(NODE[0], v4, Some(15006)).unwrap();
    unaffected();
}
