//! `inpod binds`: lists the ports on which applications listen, and how enrollment changes who can reach these ports.

mod render;
mod services;

use inpod_proto::podevents::v1::{
    GetStatusRequest, ListBindsRequest, ListBindsResponse, ServicePort,
};

use crate::{
    arguments::BindsQuery,
    error::CommandError,
    json,
    node::{Node, PodEvents},
    objects,
    out::Out,
    print_error,
};

/// Prints the ports and fails with the worst result: a pod that could not be inspected comes first, then a port that
/// enrollment changes, then unusable EndpointSlices.
pub(crate) async fn run(
    node: &Node,
    query: &BindsQuery,
    out: &mut Out,
) -> Result<(), CommandError> {
    let (ports, missing) = service_ports(node, query).await?;
    let request = ListBindsRequest {
        pod: query.selector(),
        states: query
            .filter
            .states
            .iter()
            .map(|state| (*state).into())
            .collect(),
        desired: Vec::new(),
        amiss: query.filter.unhealthy,
        let_through: query.filter.admitted_unenrolled,
        labels: query.labels.clone(),
        service_ports: ports,
    };
    let answer = node.ask(request, PodEvents::list_binds).await?;
    match json::structured(query.output.format, &answer, "ListBindsResponse")? {
        Some(text) => out.print_line(&text)?,
        None => out.print_text(&render::text(&answer.pods))?,
    }
    match (verdict(&answer), missing) {
        (Ok(()), Some(missing)) => Err(missing),
        (Err(error), Some(missing)) => {
            print_error(&format!("inpod: {missing}\n"));
            Err(error)
        }
        (verdict, None) => verdict,
    }
}

/// Returns the ports of Services. Without `--services` the list is empty, so that only the ports declared by containers
/// are known. An unusable file is returned as an error beside the list, because the caller prints everything else.
async fn service_ports(
    node: &Node,
    query: &BindsQuery,
) -> Result<(Vec<ServicePort>, Option<CommandError>), CommandError> {
    let Some(path) = &query.services else {
        return Ok((Vec::new(), None));
    };
    let status = node.ask(GetStatusRequest {}, PodEvents::get_status).await?;
    let slices = objects::read(path);
    let ports = slices.and_then(|slices| services::ports(&slices, &status.node_name));
    let missing = |cause| CommandError::Objects {
        missing: "the ports of Services are missing",
        path: path.clone(),
        cause,
    };
    Ok(match ports {
        Ok(ports) => (ports, None),
        Err(cause) => (Vec::new(), Some(missing(cause))),
    })
}

fn verdict(answer: &ListBindsResponse) -> Result<(), CommandError> {
    let unreadable = answer.pods.iter().filter(|pod| pod.failure.is_some());
    let unreadable = unreadable.count();
    if unreadable > 0 {
        return Err(CommandError::PodsUnreadable(unreadable));
    }
    let ports = answer.pods.iter().flat_map(|pod| &pod.ports);
    match ports.filter(|port| !port.changes.is_empty()).count() {
        0 => Ok(()),
        changed => Err(CommandError::PortsChange(changed)),
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
        let unreadable = PodBinds {
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
        assert_eq!(code(&[&changed, &unreadable]), 1);
    }
}
