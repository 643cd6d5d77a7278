use std::{collections::BTreeSet, net::IpAddr};

use inpod_proto::{netconfig::v1 as netconfig, required};
use inpod_types::{Failure, NetnsId, NetnsRef, PodUid, Reason, SandboxRef};
use tokio::time::{Instant, timeout_at};

use super::{Clients, Netconfig, invalid_response, probe_addresses};

#[derive(Clone, Debug)]
pub struct FoundNetns {
    pub sandbox: SandboxRef,
    /// The reference to the netns, by the path at which netconfig opened the netns.
    pub netns: NetnsRef,
    pub id: NetnsId,
    /// Set if the netns holds rules that netconfig can neither see nor replace, and no rules that netconfig can see.
    pub only_legacy_nat: bool,
}

impl Clients {
    pub async fn listening_ports(
        &self,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<BTreeSet<u32>, Failure> {
        let target = netconfig::list_listeners_request::Target::Sandbox(sandbox.into());
        let message = netconfig::ListListenersRequest {
            target: Some(target),
        };
        let listed = self
            .netconfig(Netconfig::list_listeners, message, deadline)
            .await?;
        let tcp = listed.listeners.into_iter();
        let tcp = tcp.filter(|listener| listener.protocol() == netconfig::Protocol::Tcp);
        Ok(tcp.map(|listener| listener.port).collect())
    }

    /// Finds the netns of a pod for which no ADD was received: see `FindNetns`.
    pub async fn find_netns(
        &self,
        pod: &PodUid,
        addresses: &[IpAddr],
        deadline: Instant,
    ) -> Result<FoundNetns, Failure> {
        let turn = timeout_at(deadline, self.searches.acquire()).await;
        let _turn = turn.map_err(|_elapsed| {
            let message = "the search for other pods' network namespaces took until the deadline";
            Failure::new(Reason::DeadlineExceeded, message)
        })?;
        let message = netconfig::FindNetnsRequest {
            pod_uid: pod.to_string(),
            addresses: probe_addresses(addresses),
        };
        let found = self
            .netconfig(Netconfig::find_netns, message, deadline)
            .await?;
        let invalid = |error| invalid_response("netconfig", &error);
        Ok(FoundNetns {
            sandbox: required("sandbox", found.sandbox).map_err(invalid)?,
            netns: NetnsRef::from_path(found.path),
            id: required("netns", found.netns).map_err(invalid)?,
            only_legacy_nat: found.only_legacy_nat,
        })
    }
}
