use inpod_proto::netconfig::v1::{ListListenersRequest, list_listeners_request::Target};
use inpod_types::{Failure, NetnsRef, Reason, SandboxRef};
use tokio::time::Instant;

use super::{Clients, Netconfig, deadline_in, invalid_response};
use crate::{binds::Socket, checkpoint::Record};

impl Clients {
    /// Lists the sockets in a sandbox's netns: through the claim or, without a claim, at the recorded path, verified by
    /// all recorded facts of the netns.
    pub(crate) async fn sockets(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<Vec<Socket>, Failure> {
        if record.netns_id.is_some() {
            let claimed = self
                .sockets_of(claim_target(&record.sandbox), deadline)
                .await;
            // A restarted netconfig has no claims yet.
            let is_unclaimed = |failure: &Failure| failure.reason == Reason::ClaimUnknown;
            if !claimed.as_ref().is_err_and(is_unclaimed) {
                return claimed;
            }
        }
        self.sockets_at(&record.expected_netns(), deadline).await
    }

    pub(crate) async fn sockets_at(
        &self,
        netns: &NetnsRef,
        deadline: Instant,
    ) -> Result<Vec<Socket>, Failure> {
        self.sockets_of(Target::Netns(netns.into()), deadline).await
    }

    async fn sockets_of(&self, target: Target, deadline: Instant) -> Result<Vec<Socket>, Failure> {
        let message = ListListenersRequest {
            target: Some(target),
        };
        let listed = self
            .netconfig(Netconfig::list_listeners, message, deadline)
            .await?;
        let sockets = listed.listeners.into_iter().map(Socket::try_from);
        let sockets = sockets.collect::<Result<_, _>>();
        sockets.map_err(|error| invalid_response("netconfig", &error.within("listeners")))
    }

    /// Finds the netns of a pod without an ADD. Releases the claim again, even if the caller is cancelled.
    pub(crate) async fn locate(
        &self,
        placeholder: Record,
        deadline: Instant,
    ) -> Result<NetnsRef, Failure> {
        let clients = self.clone();
        let located = tokio::spawn(async move {
            let uid = placeholder
                .runtime_uid
                .as_ref()
                .unwrap_or(&placeholder.pod.uid);
            let found = clients
                .find_netns(uid, &placeholder.addresses, deadline)
                .await?;
            clients.release(&found.sandbox, deadline_in(2)).await?;
            Ok(NetnsRef {
                device: Some(found.id.device),
                inode: Some(found.id.inode),
                cookie: Some(found.id.cookie),
                ..found.netns
            })
        });
        let ended = |_| Err(Failure::new(Reason::Internal, "the search has ended"));
        located.await.unwrap_or_else(ended)
    }
}

fn claim_target(sandbox: &SandboxRef) -> Target {
    Target::Sandbox(sandbox.into())
}
