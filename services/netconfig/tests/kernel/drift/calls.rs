//! Short forms of netconfig's calls.

use std::time::Duration;

use inpod_proto::netconfig::v1::{
    ApplyRulesRequest, ApplyRulesResponse, RemovePhase, RemoveRulesRequest,
};

use crate::harness::{Netconfig, ambient, wire};

impl Netconfig {
    pub(crate) async fn apply(&mut self, name: &str) -> ApplyRulesResponse {
        let request = ApplyRulesRequest {
            sandbox: wire(name),
            redirection: ambient(),
            probe_addresses: Vec::new(),
            require_listeners: false,
        };
        let response = self.client.apply_rules(request).await.unwrap();
        response.into_inner()
    }

    pub(crate) async fn remove(&mut self, name: &str, phase: RemovePhase) {
        let request = RemoveRulesRequest {
            sandbox: wire(name),
            phase: phase.into(),
        };
        self.client.remove_rules(request).await.unwrap();
    }

    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let socket = inpod_service::socket(self.run_dir.path(), "netconfig");
        let text = inpod_service::metrics::fetch(&socket);
        let text = tokio::time::timeout(Duration::from_secs(20), text).await;
        let text = text.unwrap().unwrap();
        let line = format!("inpod_netconfig_{name} ");
        let value = text.lines().find_map(|found| found.strip_prefix(&line));
        value.map_or(0, |value| value.parse().unwrap())
    }
}
