//! Pods in the mesh and one outside, with stock ztunnels.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use anyhow::{Context as _, ensure};
use integration::{
    App, Carried, Pod, SERVICES, Spec, TIMEOUT, ZTUNNEL_CAPABILITIES, ask, eventually, run,
};
use serde_json::Value;

use crate::common::ztunnel_pod::{Scene, ZTUNNEL};

pub(crate) const PORT: u16 = 8080;
pub(crate) const HBONE: u16 = 15008;

pub(crate) const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 7);

pub(crate) const FIRST: &str = "ztunnel";

/// Drops the node before its cgroups.
pub(crate) struct Mesh {
    pub(crate) client: Pod,
    pub(crate) server: Pod,
    pub(crate) outsider: Pod,
    /// Known to ztunnels, not added yet.
    pub(crate) next: Pod,
    _apps: Vec<App>,
    pub(crate) scene: Scene,
}

impl Mesh {
    /// Creates `client` and `server` in the mesh, served by a stock ztunnel.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let mesh = Self::without_pods()?;
        mesh.scene.node.add(&mesh.client)?;
        mesh.scene.node.add(&mesh.server)?;
        mesh.until_served(FIRST, 2)?;
        Ok(mesh)
    }

    pub(crate) fn without_pods() -> anyhow::Result<Self> {
        let scene = Scene::without_services()?;
        let node = &scene.node;
        let ambient = |name: &str| node.sandbox(Spec::new(name).ambient());
        let captured_dns = Spec::new("client").annotate("ambient.istio.io/dns-capture", "true");
        let (client, server) = (node.sandbox(captured_dns.ambient())?, ambient("server")?);
        let (next, outsider) = (ambient("next")?, node.sandbox(Spec::new("outsider"))?);
        let all = [&client, &server, &next, &outsider];
        node.configure_stock_ztunnels(&all, &[("server", SERVICE.into())])?;
        let apps = all.iter().map(|pod| App::start(&pod.netns, PORT));
        let mesh = Self {
            _apps: apps.collect::<Result<_, _>>()?,
            client,
            server,
            outsider,
            next,
            scene,
        };
        mesh.scene.write_ztunnel_manifest()?;
        SERVICES.iter().try_for_each(|it| mesh.scene.start(it))?;
        mesh.start(FIRST)?;
        mesh.scene.node.ready()?;
        Ok(mesh)
    }

    /// Starts a stock ztunnel as its pod does.
    pub(crate) fn start(&self, name: &str) -> anyhow::Result<()> {
        let cgroups = &self.scene.cgroups;
        let within = cgroups.container(ZTUNNEL, "", ZTUNNEL_CAPABILITIES)?;
        let within: Vec<&str> = within.iter().map(String::as_str).collect();
        self.scene.node.start_stock_ztunnel(&within, name)
    }

    /// Refused pods that were withdrawn stay in ztunnel's dump as pending.
    pub(crate) fn served(&self, ztunnel: &str) -> anyhow::Result<BTreeSet<String>> {
        let dump = self
            .scene
            .node
            .ask_stock_ztunnel(ztunnel, "15000/config_dump")?;
        let dump: Value = serde_json::from_str(&dump)?;
        let pods = dump.get("workloadState").and_then(Value::as_object);
        let pods = pods.context("no workloadState")?.iter();
        let up = |pod: &Value| pod.get("state").is_some_and(|state| state == "Up");
        let served = pods.filter(|(_, pod)| up(pod));
        Ok(served.map(|(uid, _)| uid.clone()).collect())
    }

    /// Waits for this many pods and readiness, which a pending pod prevents.
    pub(crate) fn until_served(&self, ztunnel: &str, pods: usize) -> anyhow::Result<()> {
        let what = format!("{ztunnel} is ready with {pods} pods");
        eventually(&what, TIMEOUT, || {
            let served = self.served(ztunnel)?;
            ensure!(served.len() == pods, "{served:?}");
            let node = &self.scene.node;
            node.ask_stock_ztunnel(ztunnel, "15021/healthz/ready")
                .map(drop)
        })
    }

    /// Returns the source that the application saw, after ztunnel logged each connection for it.
    pub(crate) fn follow(
        &self,
        from: &Pod,
        to: SocketAddr,
        carried: usize,
    ) -> anyhow::Result<(IpAddr, Vec<Carried>)> {
        let node = &self.scene.node;
        let before = node.carried_by(FIRST).len();
        let source = ask(&from.netns, to).with_context(|| format!("asking {to}"))?;
        let reported = || {
            let all = node.carried_by(FIRST);
            let new = all.get(before..).unwrap_or_default().to_vec();
            ensure!(new.len() >= carried, "of {carried} are told: {new:?}");
            anyhow::Ok(new)
        };
        let reported = eventually("ztunnel tells of its connections", TIMEOUT, reported)?;
        Ok((source, reported))
    }

    pub(crate) fn nft(&self, command: &[&str]) -> anyhow::Result<String> {
        let netns = format!("--net={}", self.scene.node.netns().path().display());
        run("nsenter", &[&[netns.as_str(), "nft"], command].concat())
    }

    /// One mesh pod reaches another by HBONE, over both families.
    pub(crate) fn reached_by_hbone(&self, from: &Pod, to: &Pod) -> anyhow::Result<()> {
        for (source, address) in from.addresses().into_iter().zip(to.addresses()) {
            let application = SocketAddr::new(address, PORT);
            let (seen, mut carried) = self.follow(from, application, 2)?;
            ensure!(seen == source, "{source} was seen as {seen}");
            carried.sort_by_key(|it| !it.is_outbound);
            let [outbound, inbound] = &carried[..] else {
                anyhow::bail!("more than the two ends of one: {carried:?}")
            };
            ensure!(outbound.is_outbound && !inbound.is_outbound, "{carried:?}");
            for end in [outbound, inbound] {
                let expected = (identity(from), identity(to), Some(application), HBONE);
                let reported = (
                    end.source_identity.clone(),
                    end.destination_identity.clone(),
                    end.hbone,
                    end.destination.port(),
                );
                ensure!(reported == expected && end.error.is_none(), "{end:?}");
                ensure!(end.source.ip() == source, "{end:?}");
            }
        }
        Ok(())
    }
}

fn identity(pod: &Pod) -> Option<String> {
    let Spec {
        namespace, name, ..
    } = &pod.spec;
    Some(format!(
        "spiffe://cluster.local/ns/{namespace}/sa/sa-{name}"
    ))
}

/// Counts packets to a port on the node's side of a pod's veth.
pub(crate) struct Wire<'a> {
    mesh: &'a Mesh,
    pod: &'a Pod,
}

impl<'a> Wire<'a> {
    pub(crate) fn watch(mesh: &'a Mesh, pod: &'a Pod) -> anyhow::Result<Self> {
        let table = format!(
            "table netdev wire-{0} {{\nchain seen {{\ntype filter hook ingress device {0} priority 0;\n\
             tcp dport {HBONE} counter\ntcp dport {PORT} counter\n}}\n}}\n",
            pod.veth
        );
        let wire = Self { mesh, pod };
        mesh.nft(&[&table])?;
        Ok(wire)
    }

    /// Returns packets to the HBONE port and to the application's.
    pub(crate) fn packets(&self) -> anyhow::Result<(u64, u64)> {
        let table = self.mesh.nft(&[
            "list",
            "table",
            "netdev",
            &format!("wire-{}", self.pod.veth),
        ])?;
        let of = |port: u16| {
            let rule = format!("tcp dport {port} counter packets ");
            let rest = table.split(&rule).nth(1);
            let number = rest.and_then(|rest| rest.split(' ').next()?.parse().ok());
            number.with_context(|| format!("{}: no {rule} in {table}", self.pod.spec.name))
        };
        Ok((of(HBONE)?, of(PORT)?))
    }
}
