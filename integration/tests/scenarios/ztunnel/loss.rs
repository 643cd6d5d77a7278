//! Tunnels' packets that are lost for a while on the node's side.

use anyhow::{Context as _, ensure};
use integration::{Pod, TIMEOUT, eventually};

use crate::ztunnel::mesh::{HBONE, Mesh};

/// IPv4 packets with a CONNECT are longer, those with only a PING are not.
const REQUEST: u16 = 110;

/// Drops every HBONE packet of a pod until dropped itself.
pub(crate) struct Loss<'a> {
    mesh: &'a Mesh,
}

impl<'a> Loss<'a> {
    pub(crate) fn begin(mesh: &'a Mesh, from: &Pod, to: &Pod) -> anyhow::Result<Self> {
        let (from, to) = (&from.veth, &to.veth);
        let table = format!(
            "table netdev loss {{\n\
             chain forth {{\ntype filter hook ingress device {from} priority 0;\n\
             tcp dport {HBONE} ip length > {REQUEST} counter\ntcp dport {HBONE} drop\n}}\n\
             chain back {{\ntype filter hook ingress device {to} priority 0;\n\
             tcp sport {HBONE} counter\n}}\n}}\n"
        );
        mesh.nft(&[&table])?;
        Ok(Self { mesh })
    }

    /// Waits for a lost request to the other pod.
    pub(crate) fn until_request(&self) -> anyhow::Result<()> {
        eventually("a request is lost", TIMEOUT, || {
            ensure!(self.counted("forth")? > 0, "none yet");
            anyhow::Ok(())
        })
    }

    /// Counts packets that the other pod sent back.
    pub(crate) fn came_back(&self) -> anyhow::Result<u64> {
        self.counted("back")
    }

    pub(crate) fn end(self) -> anyhow::Result<()> {
        self.mesh.nft(&["delete table netdev loss"]).map(drop)
    }

    fn counted(&self, chain: &str) -> anyhow::Result<u64> {
        let chain = self.mesh.nft(&["list", "chain", "netdev", "loss", chain])?;
        let number = chain.split("counter packets ").nth(1);
        let number = number.and_then(|rest| rest.split(' ').next()?.parse().ok());
        number.with_context(|| format!("no counter in {chain}"))
    }
}
