//! `inpod status`: shows whether the services are ready, and the conditions of pod-events.

use std::time::SystemTime;

use inpod_proto::podevents::v1::{Condition, GetStatusRequest};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    error::CommandError,
    node::{Node, POD_EVENTS, PodEvents},
    out::Out,
    table::Table,
    time,
};

const SERVICES: [&str; 3] = [POD_EVENTS, "netconfig", "ztunnel-broker"];

/// Prints the table, and fails with the worst result: an unreachable service comes before a service that is not ready.
pub(crate) async fn run(node: &Node, out: &mut Out) -> Result<(), CommandError> {
    let mut table = Table::new(&["SERVICE", "CONDITION", "OK", "SINCE", "MESSAGE"]);
    let mut result = Ok(());
    for service in SERVICES {
        let health = health(node, service).await;
        let message = health
            .as_ref()
            .err()
            .map(CommandError::first_line)
            .unwrap_or_default();
        table.push(to_cells([
            service,
            "ready",
            yes(health.is_ok()),
            "",
            &message,
        ]));
        result = worse(result, health);
    }
    match node.ask(GetStatusRequest {}, PodEvents::get_status).await {
        Ok(status) => {
            let now = SystemTime::now();
            let rows = status.conditions.iter().map(|it| format_condition(it, now));
            rows.for_each(|row| table.push(row));
            let about = format!("node {}, version {}", status.node_name, status.version);
            out.print_line(&inpod_service::escape_controls(&about))?;
        }
        Err(error) => result = worse(result, Err(error)),
    }
    out.print_text(&table.take())?;
    result
}

pub(crate) fn worse(
    one: Result<(), CommandError>,
    other: Result<(), CommandError>,
) -> Result<(), CommandError> {
    let severity =
        |result: &Result<(), CommandError>| result.as_ref().err().map(CommandError::exit_code);
    if severity(&other) > severity(&one) {
        other
    } else {
        one
    }
}

async fn health(node: &Node, service: &'static str) -> Result<(), CommandError> {
    if is_serving(node, service).await? {
        return Ok(());
    }
    Err(CommandError::NotReady(service))
}

pub(crate) async fn is_serving(node: &Node, service: &'static str) -> Result<bool, CommandError> {
    let mut client = HealthClient::new(node.channel(service));
    let question = HealthCheckRequest {
        service: String::new(),
    };
    let answer = client.check(node.request(question));
    let answer = node.answer(service, answer).await?;
    Ok(answer.status() == ServingStatus::Serving)
}

fn format_condition(condition: &Condition, now: SystemTime) -> Vec<String> {
    let since = time::age(condition.since, now);
    let Condition { name, message, .. } = condition;
    to_cells([POD_EVENTS, name, yes(condition.ok), &since, message])
}

fn yes(ok: bool) -> &'static str {
    if ok { "yes" } else { "no" }
}

fn to_cells(cells: [&str; 5]) -> Vec<String> {
    cells.map(str::to_owned).into()
}
