use inpod_proto::netconfig::v1::{PlanRulesRequest, PlanRulesResponse};
use inpod_types::Failure;
use tokio::time::Instant;

use super::{Clients, Netconfig};
use crate::checkpoint::Record;

impl Clients {
    /// Compares the rules in a netns with the expected rules; returns the plan for applying the expected rules.
    pub async fn plan_rules(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<PlanRulesResponse, Failure> {
        let message = PlanRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
        };
        self.netconfig(Netconfig::plan_rules, message, deadline)
            .await
    }
}
