//! `inpod pods`: lists the pods of the node with their state.

use std::time::SystemTime;

use inpod_proto::podevents::v1::{GetStatusRequest, ListPodsRequest, PodSummary};

use inpod_service::escape_controls;

use crate::{
    arguments::{Format, PodQuery},
    display,
    error::CommandError,
    json,
    node::{Node, PodEvents},
    out::Out,
    table::Table,
    time,
};

const WIDE_HEADER: [&str; 11] = [
    "NAMESPACE",
    "NAME",
    "STATE",
    "DESIRED",
    "REASON",
    "SINCE",
    "NEXT",
    "UNHEALTHY",
    "UID",
    "NETWORK",
    "CONTAINER",
];

pub(crate) async fn run(node: &Node, query: &PodQuery, out: &mut Out) -> Result<(), CommandError> {
    let request = ListPodsRequest {
        pod: query.filter.selector(),
        states: query
            .filter
            .states
            .iter()
            .map(|state| (*state).into())
            .collect(),
        desired: Vec::new(),
        amiss: query.filter.unhealthy,
        let_through: query.filter.admitted_unenrolled,
    };
    let answer = node.ask(request, PodEvents::list_pods).await?;
    match json::structured(query.output.format, &answer, "ListPodsResponse")? {
        Some(text) => out.print_line(&text),
        None => {
            let notice = kill_switch_notice(node).await;
            out.print_text(&(table(&answer.pods, query.output.format) + &notice))
        }
    }
}

/// Returns a line below the table if the kill switch keeps new pods outside the mesh, which no pod's row shows.
async fn kill_switch_notice(node: &Node) -> String {
    let answer = node.ask(GetStatusRequest {}, PodEvents::get_status).await;
    let conditions = answer.map_or_else(|_| Vec::new(), |status| status.conditions);
    let mut unmet = conditions.into_iter().filter(|condition| !condition.ok);
    let switch = unmet.find(|condition| condition.name == "kill-switch");
    switch.map_or_else(String::new, |switch| {
        format!(
            "\nThe kill switch is on: {}\n",
            escape_controls(&switch.message)
        )
    })
}

pub(crate) fn table(pods: &[PodSummary], format: Format) -> String {
    let mut table = empty(format);
    let now = SystemTime::now();
    pods.iter().for_each(|pod| table.push(row(pod, now)));
    table.take()
}

pub(crate) fn empty(format: Format) -> Table {
    match (format, WIDE_HEADER.split_last_chunk::<3>()) {
        (Format::Table | Format::Json | Format::Yaml, Some((header, _))) => Table::new(header),
        (Format::Wide, _) | (_, None) => Table::new(&WIDE_HEADER),
    }
}

pub(crate) fn row(pod: &PodSummary, now: SystemTime) -> Vec<String> {
    let who = pod.pod.clone().unwrap_or_default();
    let sandbox = pod.sandbox.clone().unwrap_or_default();
    vec![
        who.namespace,
        who.name,
        display::format_state(pod.state()).to_owned(),
        display::format_enrollment(pod.desired()).to_owned(),
        display::reason(pod.reason),
        time::age(pod.since, now),
        time::ahead(pod.next_attempt_at, now),
        unhealthy(pod),
        who.uid,
        sandbox.network_name,
        sandbox.container_id,
    ]
}

fn unhealthy(pod: &PodSummary) -> String {
    let failure = pod.last_failure.as_ref();
    let failure = failure.map(|failure| display::reason(failure.reason));
    let let_through = pod.let_through.then(|| "admitted unenrolled".to_owned());
    let all: Vec<_> = [let_through, failure].into_iter().flatten().collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use inpod_proto::types::v1 as types;

    use super::*;

    #[test]
    fn each_pod_has_its_line() {
        let pod = |name: &str| types::PodRef {
            namespace: "shop".into(),
            name: name.into(),
            uid: "u".into(),
        };
        let web = PodSummary {
            pod: Some(pod("web-0")),
            desired: types::Enrollment::Ambient.into(),
            reason: types::Reason::LabelOnNamespace.into(),
            state: 3,
            ..PodSummary::default()
        };
        let db = PodSummary {
            pod: Some(pod("db")),
            desired: types::Enrollment::Unknown.into(),
            reason: types::Reason::SourceUnavailable.into(),
            state: 1,
            let_through: true,
            last_failure: Some(types::Failure {
                reason: 35,
                ..types::Failure::default()
            }),
            ..PodSummary::default()
        };
        assert_eq!(
            table(&[web, db], Format::Table),
            "NAMESPACE  NAME   STATE     DESIRED  REASON              SINCE  NEXT  UNHEALTHY
\
             shop       web-0  enrolled  ambient  LABEL_ON_NAMESPACE  -      -     -\n\
             shop       db     out       unknown  SOURCE_UNAVAILABLE  -      -     admitted unenrolled, SOURCE_UNAVAILABLE\n"
        );
        assert_eq!(
            table(&[], Format::Wide),
            "NAMESPACE  NAME  STATE  DESIRED  REASON  SINCE  NEXT  UNHEALTHY  UID  NETWORK  CONTAINER\n"
        );
    }
}
