//! Creates many pods at once with few processes.

use std::{
    io::Write as _,
    net::{Ipv4Addr, Ipv6Addr},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::Ordering,
    thread,
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;

use super::{NEXT, Node};
use crate::{Call, Outcome, Pod, Spec, TIMEOUT, eventually, pod::exec_in, process::succeeded};

const AT_ONCE: usize = 4;

/// The number of ports per bridge; the kernel's limit is 1,023 ports (`BR_PORT_BITS`). Pods of another bridge are not
/// reachable and receive no multicasts.
const PORTS: u16 = 1000;

/// The most pods of one call that reach each other; the pods of smaller calls reach all pods of their bridge. A bridge
/// copies a multicast to every port, and a processor drops packets while 1,000 wait (`net.core.netdev_max_backlog`, one
/// limit for all network namespaces). With 300 ports, three ARP or neighbor solicitations in a row were dropped now and
/// then, and a new connection of ztunnel failed with EHOSTUNREACH.
const TOGETHER: usize = 100;

impl Node {
    /// Creates many sandboxes, like [`Node::sandbox`]. More than 100 sandboxes do not reach each other.
    pub fn sandboxes(&self, specs: Vec<Spec>) -> anyhow::Result<Vec<Pod>> {
        let plans: Vec<_> = specs.into_iter().map(|spec| self.plan(spec)).collect();
        let own = self.netns.path();
        let bridges = plans
            .iter()
            .map(|it| it.host / PORTS + 1)
            .max()
            .unwrap_or_default();
        for bridge in self.bridges.get()..bridges {
            let name = format!("cni{bridge}");
            exec_in(own, &["ip", "link", "add", &name, "up", "type", "bridge"])?;
            self.bridges.set(bridge + 1);
        }
        let are_many = plans.len() > TOGETHER;
        batch(
            own,
            &[],
            plans.iter().map(|it| format!("netns add {}", it.netns)),
        )?;
        let links = plans.iter().flat_map(|it| {
            let (veth, netns, bridge) = (&it.veth, &it.netns, it.host / PORTS);
            let is_isolated = are_many || bridge > 0;
            let isolated = if is_isolated { "on" } else { "off" };
            [
                format!("link add {veth} type veth peer name eth0 netns {netns}"),
                format!("link set {veth} master cni{bridge} up"),
                format!("link set {veth} type bridge_slave isolated {isolated}"),
            ]
        });
        batch(own, &[], links)?;
        let pods = plans.into_iter().map(|plan| self.realise(plan));
        let pods = pods.collect::<anyhow::Result<Vec<_>>>()?;
        // The manifests are written last, because pod-events rereads every file of a changed directory.
        pods.iter()
            .try_for_each(|pod| self.write_manifest(&pod.spec))?;
        Ok(pods)
    }

    /// Creates many pods, like [`Node::pod`].
    pub fn pods(&self, specs: Vec<Spec>) -> anyhow::Result<Vec<Pod>> {
        let pods = self.sandboxes(specs)?;
        pods.iter()
            .try_for_each(|pod| self.until_known(&pod.spec))?;
        let calls: Vec<_> = pods.iter().map(|pod| self.call(Call::add, pod)).collect();
        let share = calls.len().div_ceil(AT_ONCE).max(1);
        let outcomes: Vec<_> = thread::scope(|scope| {
            let run = |calls: &[Call]| calls.iter().map(Call::run).collect::<Vec<_>>();
            let shares: Vec<_> = calls
                .chunks(share)
                .map(|calls| scope.spawn(move || run(calls)))
                .collect();
            let outcomes = shares.into_iter().filter_map(|share| share.join().ok());
            outcomes.flatten().collect()
        });
        ensure!(outcomes.len() == calls.len(), "a thread has panicked");
        for (pod, outcome) in pods.iter().zip(outcomes) {
            let Outcome { code, stderr, .. } = outcome?;
            ensure!(code == 0, "ADD of {}: {code} {stderr}", pod.spec.name);
        }
        Ok(pods)
    }

    /// Waits until pod-events has read the manifest: among hundreds of manifests, reading takes longer than an ADD
    /// waits.
    pub fn until_known(&self, spec: &Spec) -> anyhow::Result<()> {
        let what = format!("the manifest of {} is read", spec.name);
        eventually(&what, TIMEOUT, || self.explain(spec).map(drop))
    }

    fn plan(&self, spec: Spec) -> Plan {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Plan {
            spec,
            number,
            host: self.next_address.replace(self.next_address.get() + 1),
            netns: format!("cni-{}-{number}", std::process::id()),
            veth: format!("veth{number}"),
        }
    }

    fn realise(&self, plan: Plan) -> anyhow::Result<Pod> {
        let host = plan.host;
        let v4: Ipv4Addr = (Ipv4Addr::new(10, 77, 0, 0).to_bits() + u32::from(host)).into();
        let v6: Ipv6Addr = [0xfd77, 0, 0, 0, 0, 0, 0, host].into();
        let inside = [
            "link set lo up".to_owned(),
            format!("addr add {v4}/16 dev eth0"),
            format!("addr add {v6}/64 dev eth0 nodad"),
            "link set eth0 up".to_owned(),
            "route add default via 10.77.0.1".to_owned(),
            "route add default via fd77::1".to_owned(),
        ];
        batch(self.netns.path(), &["-n", &plan.netns], inside.into_iter())?;
        let path = Path::new("/run/netns").join(&plan.netns);
        Ok(Pod {
            spec: plan.spec,
            container_id: format!("{:064x}", plan.number),
            veth: plan.veth,
            v4,
            v6,
            netns: Netns::open(&path, &["/run/netns".into()])?,
        })
    }
}

struct Plan {
    spec: Spec,
    number: u32,
    host: u16,
    netns: String,
    veth: String,
}

/// Runs many ip(8) commands in one process; `commands` has one per line.
fn batch(
    netns: &Path,
    flags: &[&str],
    commands: impl Iterator<Item = String>,
) -> anyhow::Result<()> {
    let lines: Vec<_> = commands.collect();
    let mut child = Command::new("nsenter")
        .arg(format!("--net={}", netns.display()))
        .arg("ip")
        .args(flags)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run ip; is iproute2 installed?")?;
    let mut input = child.stdin.take().context("its input")?;
    input.write_all((lines.join("\n") + "\n").as_bytes())?;
    drop(input);
    succeeded("ip", &child.wait_with_output()?).map(drop)
}
