//! Two enrolled pods and one outside the mesh, each with an application, and checks of the paths between them.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{Access, App, Node, Pod, SERVICES, Spec, ask};

pub(crate) const PORT: u16 = 8080;

pub(crate) struct Mesh {
    pub(crate) a: Pod,
    pub(crate) b: Pod,
    pub(crate) outsider: Pod,
    _apps: Vec<App>,
    pub(crate) node: Node,
}

impl Mesh {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Self::on(Node::running()?, Spec::new("b").ambient())
    }

    /// Creates the same with a ztunnel that speaks HBONE.
    pub(crate) fn by_hbone() -> anyhow::Result<Self> {
        Self::by_hbone_with(Spec::new("b").ambient())
    }

    /// Creates the same with another manifest of the pod b.
    pub(crate) fn by_hbone_with(b: Spec) -> anyhow::Result<Self> {
        let node = Node::new()?;
        SERVICES.iter().try_for_each(|it| node.start(it))?;
        node.start_hbone_ztunnel()?;
        node.ready()?;
        Self::on(node, b)
    }

    fn on(node: Node, b: Spec) -> anyhow::Result<Self> {
        let a = node.pod(Spec::new("a").ambient())?;
        let b = node.pod(b)?;
        let outsider = node.pod(Spec::new("outsider"))?;
        let apps = [&a, &b, &outsider]
            .iter()
            .map(|pod| App::start(&pod.netns, PORT))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            a,
            b,
            outsider,
            _apps: apps,
            node,
        })
    }

    /// Returns the source that the application saw and the listeners that accepted the connection.
    pub(crate) fn follow(
        &self,
        from: &Netns,
        to: SocketAddr,
    ) -> anyhow::Result<(IpAddr, Vec<Access>)> {
        let before = self.node.accesses()?.len();
        let source = ask(from, to).with_context(|| format!("asking {to}"))?;
        let all = self.node.accesses()?;
        let new = all.into_iter().skip(before);
        Ok((
            source,
            new.filter(|access| access.event == "accepted").collect(),
        ))
    }

    /// Returns the listeners as pod and port.
    pub(crate) fn path(accesses: &[Access]) -> Vec<(&str, u64)> {
        accesses
            .iter()
            .map(|access| (access.uid.as_str(), access.listener))
            .collect()
    }

    pub(crate) fn between_enrolled_pods(&self) -> anyhow::Result<()> {
        self.a_reaches_b_by(15006)
    }

    /// Expects connections to arrive at a listener of b.
    pub(crate) fn a_reaches_b_by(&self, listener: u64) -> anyhow::Result<()> {
        for (from, to) in self.a.addresses().into_iter().zip(self.b.addresses()) {
            let (source, taken) = self.follow(&self.a.netns, SocketAddr::new(to, PORT))?;
            let wanted = [
                (self.a.spec.uid.as_str(), 15001),
                (self.b.spec.uid.as_str(), listener),
            ];
            ensure!(
                Self::path(&taken) == wanted,
                "{to} was reached through {taken:?}"
            );
            ensure!(
                source == from,
                "the application in b saw {source}, not {from}"
            );
        }
        Ok(())
    }

    fn inbound(&self, from: IpAddr, to: IpAddr) -> anyhow::Result<()> {
        let (source, taken) = self.follow(&self.outsider.netns, SocketAddr::new(to, PORT))?;
        ensure!(
            Self::path(&taken) == [(self.b.spec.uid.as_str(), 15006)],
            "{to} was reached through {taken:?}"
        );
        ensure!(
            source == from,
            "the application in b saw {source}, not {from}"
        );
        Ok(())
    }

    pub(crate) fn reached_from_outside_v4(&self) -> anyhow::Result<()> {
        self.inbound(self.outsider.v4.into(), self.b.v4.into())
    }

    pub(crate) fn reached_from_outside_v6(&self) -> anyhow::Result<()> {
        self.inbound(self.outsider.v6.into(), self.b.v6.into())
    }

    pub(crate) fn reached_from_outside(&self) -> anyhow::Result<()> {
        self.reached_from_outside_v4()?;
        self.reached_from_outside_v6()
    }

    pub(crate) fn to_outside(&self) -> anyhow::Result<()> {
        self.a_reaches_in_plaintext(&self.outsider)
    }

    /// Expects connections to leave by ztunnel, and to arrive at a pod that is outside of the mesh.
    pub(crate) fn a_reaches_in_plaintext(&self, pod: &Pod) -> anyhow::Result<()> {
        for (from, to) in self.a.addresses().into_iter().zip(pod.addresses()) {
            let (source, taken) = self.follow(&self.a.netns, SocketAddr::new(to, PORT))?;
            ensure!(
                Self::path(&taken) == [(self.a.spec.uid.as_str(), 15001)],
                "{to} was reached through {taken:?}"
            );
            ensure!(
                source == from,
                "the application outside saw {source}, not {from}"
            );
        }
        Ok(())
    }

    fn direct(&self, address: IpAddr) -> anyhow::Result<()> {
        let (source, taken) = self.follow(&self.a.netns, SocketAddr::new(address, PORT))?;
        ensure!(taken.is_empty(), "{address} was reached through {taken:?}");
        ensure!(source == address, "the application saw {source}");
        Ok(())
    }

    pub(crate) fn loopback(&self) -> anyhow::Result<()> {
        self.direct([127, 0, 0, 1].into())?;
        self.direct([0, 0, 0, 0, 0, 0, 0, 1].into())
    }

    pub(crate) fn itself(&self) -> anyhow::Result<()> {
        self.a
            .addresses()
            .into_iter()
            .try_for_each(|address| self.direct(address))
    }
}
