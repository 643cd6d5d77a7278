//! `inpod pods --watch`: prints the pods, then each change.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use inpod_proto::{
    podevents::v1::{
        PodSummary, WatchEnrollmentsRequest, WatchEnrollmentsResponse,
        watch_enrollments_response::Event,
    },
    types::v1::PodRef,
};
use tokio::time::sleep;
use tonic::Request;

use crate::{
    arguments::{Format, PodFilter, PodQuery},
    error::CommandError,
    json,
    node::{Node, POD_EVENTS, PodEvents, ServiceClient as _, is_behind},
    out::Out,
    pods,
    table::Table,
};

/// The delay before the watch starts over, because the service may be overloaded.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Runs until the service ends the stream, or until the output is closed.
pub(crate) async fn run(node: &Node, query: &PodQuery, out: &mut Out) -> Result<(), CommandError> {
    loop {
        match watch(node, query, out).await {
            // The service has dropped changes; a new watch starts with the complete state.
            Err(error) if is_behind(&error) => sleep(RETRY_INTERVAL).await,
            ended => return ended,
        }
    }
}

async fn watch(node: &Node, query: &PodQuery, out: &mut Out) -> Result<(), CommandError> {
    // The request has no timeout, because a timeout would end the whole stream.
    let request = Request::new(WatchEnrollmentsRequest {
        pod: query.filter.selector(),
    });
    let mut client = PodEvents::connect(node);
    let mut stream = node
        .answer(POD_EVENTS, client.watch_enrollments(request))
        .await?;
    let mut screen = Screen::new(query);
    loop {
        let response = stream.message().await;
        let response = response.map_err(|status| node.error(POD_EVENTS, &status))?;
        let ended = || node.unreachable(POD_EVENTS, "the service ended the stream".to_owned());
        screen.show(&response.ok_or_else(ended)?, out)?;
    }
}

struct Screen<'a> {
    query: &'a PodQuery,
    table: Table,
    complete: bool,
    /// The pods that matched last: a pod that no longer matches is printed once more.
    shown: BTreeSet<(String, String)>,
}

fn key(pod: Option<&PodRef>) -> (String, String) {
    let pod = pod.cloned().unwrap_or_default();
    (pod.namespace, pod.name)
}

impl<'a> Screen<'a> {
    fn new(query: &'a PodQuery) -> Self {
        Self {
            query,
            table: pods::empty(query.output.format),
            complete: false,
            shown: BTreeSet::new(),
        }
    }

    fn show(
        &mut self,
        response: &WatchEnrollmentsResponse,
        out: &mut Out,
    ) -> Result<(), CommandError> {
        if !self.matches(response) {
            return Ok(());
        }
        const NAME: &str = "WatchEnrollmentsResponse";
        if self.query.output.format == Format::Json {
            return out.print_line(&json::line(response, NAME)?);
        }
        match json::structured(self.query.output.format, response, NAME)? {
            Some(text) => out.print_line(&format!("---\n{text}")),
            None => out.print_text(&self.lines(response)),
        }
    }

    fn matches(&mut self, response: &WatchEnrollmentsResponse) -> bool {
        match &response.event {
            Some(Event::Pod(pod)) => {
                let key = key(pod.pod.as_ref());
                if matches_filter(&self.query.filter, pod) {
                    self.shown.insert(key);
                    true
                } else {
                    self.shown.remove(&key)
                }
            }
            Some(Event::Gone(pod)) => self.shown.remove(&key(Some(pod))),
            Some(Event::InstanceId(_) | Event::StateComplete(_)) | None => true,
        }
    }

    /// Renders nothing until the initial state is complete, then the table, then a line per change.
    fn lines(&mut self, response: &WatchEnrollmentsResponse) -> String {
        match &response.event {
            Some(Event::Pod(pod)) => self.table.push(pods::row(pod, SystemTime::now())),
            Some(Event::Gone(pod)) => {
                let cells = [&pod.namespace, &pod.name, "gone"];
                self.table.push(cells.map(str::to_owned));
            }
            Some(Event::StateComplete(_)) => self.complete = true,
            Some(Event::InstanceId(_)) | None => {}
        }
        if self.complete {
            self.table.take()
        } else {
            String::new()
        }
    }
}

fn matches_filter(filter: &PodFilter, pod: &PodSummary) -> bool {
    (filter.states.is_empty() || filter.states.contains(&pod.state()))
        && (!filter.unhealthy || pod.last_failure.is_some() || pod.let_through)
        && (!filter.admitted_unenrolled || pod.let_through)
}

#[cfg(test)]
mod tests {
    use inpod_proto::podevents::v1::{PodState, StateComplete};

    use super::*;
    use crate::arguments::Output;

    fn response(event: Event) -> WatchEnrollmentsResponse {
        WatchEnrollmentsResponse { event: Some(event) }
    }

    fn web() -> PodRef {
        PodRef {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u".into(),
        }
    }

    fn pod_event(state: PodState) -> WatchEnrollmentsResponse {
        response(Event::Pod(PodSummary {
            pod: Some(web()),
            state: state.into(),
            ..PodSummary::default()
        }))
    }

    fn query(states: Vec<PodState>) -> PodQuery {
        PodQuery {
            filter: PodFilter {
                states,
                ..PodFilter::default()
            },
            watch: true,
            output: Output {
                format: Format::Table,
            },
        }
    }

    #[test]
    fn the_state_is_printed_when_it_is_complete_and_changes_as_they_come() {
        let query = query(Vec::new());
        let mut screen = Screen::new(&query);
        assert_eq!(screen.lines(&response(Event::InstanceId("i".into()))), "");
        assert_eq!(screen.lines(&pod_event(PodState::Out)), "");
        let first = screen.lines(&response(Event::StateComplete(StateComplete {})));
        assert_eq!(first.lines().count(), 2, "{first}");
        assert!(
            screen
                .lines(&pod_event(PodState::Enrolled))
                .contains("enrolled")
        );
        assert!(screen.lines(&response(Event::Gone(web()))).contains("gone"));
    }

    #[test]
    fn that_a_pod_is_no_more_what_is_asked_for_is_told_once() {
        let query = query(vec![PodState::Out]);
        let mut screen = Screen::new(&query);
        let matched: Vec<_> = [
            PodState::Enrolled,
            PodState::Out,
            PodState::Enrolled,
            PodState::Enrolled,
        ]
        .into_iter()
        .map(|state| screen.matches(&pod_event(state)))
        .collect();
        assert_eq!(matched, [false, true, true, false]);
        assert!(!screen.matches(&response(Event::Gone(web()))));
    }
}
