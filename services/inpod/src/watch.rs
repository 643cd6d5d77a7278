//! `inpod pods --watch`: the pods, then every change.

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
    arguments::{Format, Query},
    ask::{Node, POD_EVENTS, is_behind},
    error::AskError,
    json,
    out::Out,
    pods,
    table::Table,
};

/// Before everything is read again: the service may have more calls than it takes.
const AGAIN: Duration = Duration::from_secs(1);

/// Prints until the service ends, or nobody reads.
pub(crate) async fn run(node: &Node, query: &Query, out: &mut Out) -> Result<(), AskError> {
    loop {
        match follow(node, query, out).await {
            // What was missed is read again from the start.
            Err(error) if is_behind(&error) => sleep(AGAIN).await,
            ended => return ended,
        }
    }
}

async fn follow(node: &Node, query: &Query, out: &mut Out) -> Result<(), AskError> {
    // Without a timeout: it would end the stream.
    let request = Request::new(WatchEnrollmentsRequest {
        pod: pods::selector(query),
    });
    let mut client = node.pod_events();
    let mut stream = node
        .answer(POD_EVENTS, client.watch_enrollments(request))
        .await?;
    let mut screen = Screen::new(query);
    loop {
        let told = stream.message().await;
        let told = told.map_err(|status| node.error(POD_EVENTS, &status))?;
        let ended = || node.unreachable(POD_EVENTS, "it ended the stream".to_owned());
        screen.show(&told.ok_or_else(ended)?, out)?;
    }
}

/// What is shown of a stream.
struct Screen<'a> {
    query: &'a Query,
    table: Table,
    complete: bool,
    /// Whom the query took when they were told last: that they are no more what it asks for is told, too.
    taken: BTreeSet<(String, String)>,
}

fn key(pod: Option<&PodRef>) -> (String, String) {
    let pod = pod.cloned().unwrap_or_default();
    (pod.namespace, pod.name)
}

impl<'a> Screen<'a> {
    fn new(query: &'a Query) -> Self {
        Self {
            query,
            table: pods::empty(),
            complete: false,
            taken: BTreeSet::new(),
        }
    }

    fn show(&mut self, told: &WatchEnrollmentsResponse, out: &mut Out) -> Result<(), AskError> {
        if !self.takes(told) {
            return Ok(());
        }
        if self.query.format == Format::Json {
            return out.line(&json::line(told, "WatchEnrollmentsResponse")?);
        }
        out.text(&self.lines(told))
    }

    fn takes(&mut self, told: &WatchEnrollmentsResponse) -> bool {
        match &told.event {
            Some(Event::Pod(pod)) => {
                let key = key(pod.pod.as_ref());
                if is_asked_for(self.query, pod) {
                    self.taken.insert(key);
                    true
                } else {
                    self.taken.remove(&key)
                }
            }
            Some(Event::Gone(pod)) => self.taken.remove(&key(Some(pod))),
            Some(Event::InstanceId(_) | Event::StateComplete(_)) | None => true,
        }
    }

    /// What is to be printed: all at once when the state is complete, then a line for each change.
    fn lines(&mut self, told: &WatchEnrollmentsResponse) -> String {
        match &told.event {
            Some(Event::Pod(pod)) => self.table.push(pods::row(pod, SystemTime::now())),
            Some(Event::Gone(pod)) => {
                let cells = [&pod.namespace, &pod.name, "gone", "", "", "", "", ""];
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

fn is_asked_for(query: &Query, pod: &PodSummary) -> bool {
    (query.states.is_empty() || query.states.contains(&pod.state()))
        && (!query.amiss || pod.last_failure.is_some() || pod.let_through)
        && (!query.let_through || pod.let_through)
}

#[cfg(test)]
mod tests {
    use inpod_proto::podevents::v1::{PodState, StateComplete};

    use super::*;

    fn told(event: Event) -> WatchEnrollmentsResponse {
        WatchEnrollmentsResponse { event: Some(event) }
    }

    fn web() -> PodRef {
        PodRef {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u".into(),
        }
    }

    fn stands(state: PodState) -> WatchEnrollmentsResponse {
        told(Event::Pod(PodSummary {
            pod: Some(web()),
            state: state.into(),
            ..PodSummary::default()
        }))
    }

    fn query(states: Vec<PodState>) -> Query {
        Query {
            namespace: None,
            states,
            amiss: false,
            let_through: false,
            watch: true,
            format: Format::Table,
        }
    }

    #[test]
    fn the_state_is_printed_when_it_is_complete_and_changes_as_they_come() {
        let query = query(Vec::new());
        let mut screen = Screen::new(&query);
        assert_eq!(screen.lines(&told(Event::InstanceId("i".into()))), "");
        assert_eq!(screen.lines(&stands(PodState::Out)), "");
        let first = screen.lines(&told(Event::StateComplete(StateComplete {})));
        assert_eq!(first.lines().count(), 2, "{first}");
        assert!(
            screen
                .lines(&stands(PodState::Enrolled))
                .contains("enrolled")
        );
        assert!(screen.lines(&told(Event::Gone(web()))).contains("gone"));
    }

    #[test]
    fn that_a_pod_is_no_more_what_is_asked_for_is_told_once() {
        let query = query(vec![PodState::Out]);
        let mut screen = Screen::new(&query);
        let takes: Vec<_> = [
            PodState::Enrolled,
            PodState::Out,
            PodState::Enrolled,
            PodState::Enrolled,
        ]
        .into_iter()
        .map(|state| screen.takes(&stands(state)))
        .collect();
        assert_eq!(takes, [false, true, true, false]);
        assert!(!screen.takes(&told(Event::Gone(web()))));
    }
}
