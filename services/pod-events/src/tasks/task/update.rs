//! Updates the rules of a pod whose annotations or addresses changed, while the pod stays in the mesh.

use std::{collections::BTreeSet, net::IpAddr, time::SystemTime};

use inpod_proto::netconfig::v1::inspect_netns_request::Target;
use inpod_types::{Enrollment, Failure, Reason};

use super::{Step, Task};
use crate::{
    checkpoint::Record,
    clients::{InspectionScope, deadline_in},
    pod::Pod,
};

impl Task {
    /// Compares a record with the pod's current requests, as far as the requests are known.
    pub(super) fn is_in_sync(&self, record: &Record, pod: &Pod, enrollment: Enrollment) -> bool {
        let compared = pod.addresses.is_empty()
            || self.compared_addresses == pod.addresses
            || is_same(&record.addresses, &pod.addresses);
        let wished = match self.shared.redirection_for(pod, enrollment) {
            Ok(redirection) => record.redirection == redirection,
            // The update reports a malformed annotation; an unknown permission changes nothing.
            Err(failure) => failure.reason != Reason::InvalidField,
        };
        compared && wished
    }

    /// Applies the pod's current settings and addresses. A failure changes nothing.
    pub(super) async fn update(&mut self) -> Result<Step, Failure> {
        let inventory = self.shared.source.inventory();
        let Some(known) = self.records.last() else {
            return Ok(Step::Done);
        };
        let Some(pod) = inventory.pod(&self.key).filter(|pod| known.belongs_to(pod)) else {
            return Ok(Step::Done);
        };
        let updated = Record {
            redirection: self.shared.redirection_of(pod)?,
            addresses: self.verified_addresses(known, &pod.addresses).await?,
            ..Record::clone(known)
        };
        let is_to_another = updated.redirection.is_sidecar() != known.redirection.is_sidecar();
        if is_to_another || updated == **known {
            self.compared_addresses.clone_from(&pod.addresses);
            return Ok(Step::Continue);
        }
        // Other changes need no further port of ztunnel, which may be away at the moment.
        let begins_dns = updated.redirection.asks_for_dns() && !known.redirection.asks_for_dns();
        let updated = self
            .shared
            .pipeline
            .update(updated, begins_dns, &mut self.timeline)
            .await?;
        tracing::info!(pod = %updated.pod, sandbox = %updated.sandbox, "Changed");
        self.compared_addresses.clone_from(&pod.addresses);
        if let Some(record) = self.records.last_mut() {
            *record = updated.into();
        }
        self.failure = None;
        self.evidence.rules = Some(SystemTime::now());
        Ok(Step::Continue)
    }

    /// Returns the addresses of the pod's status that are present in the netns, or else the recorded addresses. The
    /// status may still show the previous sandbox's addresses.
    async fn verified_addresses(
        &self,
        record: &Record,
        shown: &[IpAddr],
    ) -> Result<Vec<IpAddr>, Failure> {
        if shown.is_empty() || is_same(&record.addresses, shown) {
            return Ok(record.addresses.clone());
        }
        let clients = &self.shared.pipeline.clients;
        let target = Target::Sandbox((&record.sandbox).into());
        let seen = clients
            .inspect(target, InspectionScope::All, deadline_in(5))
            .await?;
        let inside: BTreeSet<IpAddr> = seen
            .addresses
            .iter()
            .filter_map(|address| address.parse().ok())
            .collect();
        let proven = shown.iter().filter(|address| inside.contains(address));
        let proven: Vec<IpAddr> = proven.copied().collect();
        let known = || record.addresses.clone();
        Ok(if proven.is_empty() { known() } else { proven })
    }
}

fn is_same(left: &[IpAddr], right: &[IpAddr]) -> bool {
    let set = |all: &[IpAddr]| all.iter().copied().collect::<BTreeSet<_>>();
    set(left) == set(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_addresses_means_nothing() {
        let [a, b]: [IpAddr; 2] = ["10.0.0.1", "fd00::1"].map(|it| it.parse().unwrap());
        assert!(is_same(&[a, b], &[b, a]));
        assert!(!is_same(&[a, b], &[a]));
    }
}
