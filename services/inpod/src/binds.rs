//! `inpod binds`: what applications listen on, and what enrollment changes about who reaches them.

mod selectors;
mod services;
mod told;

use inpod_proto::podevents::v1::{ListBindsRequest, ListBindsResponse};

use services::Led;

use crate::{
    arguments::{BindsQuery, Format},
    ask::{Node, POD_EVENTS},
    complain,
    error::AskError,
    json,
    out::Out,
};

/// Prints them. What could not be looked into is the error, else what changes, else what Services could not be asked for.
pub(crate) async fn run(node: &Node, query: &BindsQuery, out: &mut Out) -> Result<(), AskError> {
    let Led { ports, missing } = service_ports(node, query).await?;
    let request = ListBindsRequest {
        pod: query.pod.clone(),
        states: query.states.iter().map(|state| (*state).into()).collect(),
        desired: Vec::new(),
        amiss: query.amiss,
        let_through: query.let_through,
        labels: query.labels.clone(),
        service_ports: ports,
    };
    let mut client = node.pod_events();
    let answer = client.list_binds(node.request(request));
    let answer = node.answer(POD_EVENTS, answer).await?;
    match query.format {
        Format::Json => out.line(&json::pretty(&answer, "ListBindsResponse")?)?,
        Format::Table => out.text(&told::text(&answer.pods))?,
    }
    let missing = missing.map(|cause| AskError::ServicesUnknown(Box::new(cause)));
    match (verdict(&answer), missing) {
        (Ok(()), Some(missing)) => Err(missing),
        (Err(error), Some(missing)) => {
            complain(&format!("inpod: {missing}\n"));
            Err(error)
        }
        (verdict, None) => verdict,
    }
}

/// Those that Services lead to, where that is asked for. Without Kubernetes the ports that containers declare are all
/// that is known, and the rest is as right as with it.
async fn service_ports(node: &Node, query: &BindsQuery) -> Result<Led, AskError> {
    if query.services {
        services::ports(node, query).await
    } else {
        Ok(Led::default())
    }
}

fn verdict(answer: &ListBindsResponse) -> Result<(), AskError> {
    let unseen = answer.pods.iter().filter(|pod| pod.failure.is_some());
    let unseen = unseen.count();
    if unseen > 0 {
        return Err(AskError::Unseen(unseen));
    }
    let ports = answer.pods.iter().flat_map(|pod| &pod.ports);
    match ports.filter(|port| !port.changes.is_empty()).count() {
        0 => Ok(()),
        changed => Err(AskError::Changes(changed)),
    }
}

#[cfg(test)]
mod tests {
    use inpod_proto::{
        podevents::v1::{PodBinds, PortBinds},
        types::v1::Failure,
    };

    use super::*;

    #[test]
    fn what_was_not_seen_outweighs_what_changes() {
        let changed = PodBinds {
            ports: vec![PortBinds {
                changes: vec![1],
                ..PortBinds::default()
            }],
            ..PodBinds::default()
        };
        let unseen = PodBinds {
            failure: Some(Failure::default()),
            ..PodBinds::default()
        };
        let code = |pods: &[&PodBinds]| {
            let pods = pods.iter().map(|pod| (*pod).clone()).collect();
            let verdict = verdict(&ListBindsResponse { pods });
            verdict.map_or_else(|error| error.exit_code(), |()| 0)
        };
        assert_eq!(code(&[]), 0);
        assert_eq!(code(&[&PodBinds::default()]), 0);
        assert_eq!(code(&[&PodBinds::default(), &changed]), 4);
        assert_eq!(code(&[&changed, &unseen]), 1);
    }
}
