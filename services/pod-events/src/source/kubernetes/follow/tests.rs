use std::sync::Mutex;

use futures_util::stream;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Client,
    client::Body,
    core::{PartialObjectMeta, Status},
};
use tonic::codegen::Bytes;

use super::*;
use crate::source::kubernetes::take;

type Namespaces = PartialObjectMeta<k8s::Namespace>;
type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

fn whole(text: String) -> Answer {
    let body = Full::new(Bytes::from(text));
    body.map_err(|never| match never {}).boxed_unsync()
}

/// What a watch tells before its time is over.
#[derive(Clone, Copy, Debug)]
enum Tells {
    Nothing,
    Bookmark,
}

/// A server that is at a version, or does not say it.
#[derive(Clone, Debug)]
struct Server {
    at: Option<u64>,
    tells: Tells,
    /// The questions that are no watches.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(at: Option<u64>, tells: Tells) -> Self {
        let asked = Arc::default();
        Self { at, tells, asked }
    }

    fn answer(&self, query: &str) -> Response<Answer> {
        let mut parts = query.split('&');
        if let Some(lasts) = parts.find_map(|part| part.strip_prefix("timeoutSeconds=")) {
            return Response::new(self.watched(Duration::from_secs(lasts.parse().unwrap())));
        }
        self.asked.lock().unwrap().push(query.to_owned());
        match self.at {
            Some(at) => {
                let list = r#"{"kind":"List","apiVersion":"v1","items":[],"metadata""#;
                let list = format!(r#"{list}:{{"resourceVersion":"{at}"}}}}"#);
                Response::new(whole(list))
            }
            None => {
                let mut refused = Response::new(whole("{}".to_owned()));
                *refused.status_mut() = http::StatusCode::FORBIDDEN;
                refused
            }
        }
    }

    fn watched(&self, lasts: Duration) -> Answer {
        let text = match self.tells {
            Tells::Nothing => String::new(),
            Tells::Bookmark => {
                let object = r#"{"kind":"Namespace","apiVersion":"v1","metadata""#;
                let object = format!(r#"{object}:{{"resourceVersion":"5001"}}}}"#);
                format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n")
            }
        };
        let told = stream::iter([Ok::<_, std::io::Error>(Frame::data(Bytes::from(text)))]);
        let end = stream::once(async move {
            sleep(lasts).await;
            Ok(Frame::data(Bytes::new()))
        });
        StreamBody::new(told.chain(end)).boxed_unsync()
    }

    /// One that follows it.
    fn followed(&self) -> Follower<Namespaces> {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let answer = server.answer(request.uri().query().unwrap_or_default());
            std::future::ready(Ok::<_, std::io::Error>(answer))
        });
        let store = Store::new(Arc::default());
        Follower {
            api: Api::all(Client::new(service, "default")),
            fields: None,
            page: PAGE_OF_METADATA,
            known: Arc::new(Known {
                inventory: watch::Sender::new(Arc::new(store.inventory())),
                health: watch::Sender::new(None),
                store: Mutex::new(store),
            }),
            pulse: Arc::new(Pulse::new()),
            pace: Pace::default(),
            take: |store, told| {
                let read = Arc::clone(&store.read);
                let seen = |object| super::super::seen_namespace(object, &read);
                take(&mut store.namespaces, "namespaces", told, seen);
            },
            version: None,
        }
    }
}

/// How a watch from version 5000 ends.
async fn end_of_watch(server: &Server) -> End {
    server.followed().watch("5000".to_owned()).await
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_behind_the_place_of_a_watch_is_listed_anew() {
    for at in [1, 4999] {
        let server = Server::new(Some(at), Tells::Nothing);
        let end = end_of_watch(&server).await;
        let why = format!("version {at},");
        assert!(
            matches!(&end, End::Forgotten(said) if said.contains(&why)),
            "{at}: {end:?}"
        );
        let asked = server.asked.lock().unwrap().clone();
        assert!(
            asked.len() == 1 && asked[0].contains("limit=1"),
            "{asked:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_as_far_as_a_quiet_watch_or_does_not_say_it_is_not_listed() {
    for at in [Some(5000), Some(6000), None] {
        let end = end_of_watch(&Server::new(at, Tells::Nothing)).await;
        assert!(matches!(end, End::Renewed), "{at:?}: {end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_has_told_how_far_it_is_is_not_asked() {
    let server = Server::new(Some(1), Tells::Bookmark);
    let end = end_of_watch(&server).await;
    assert!(matches!(end, End::Renewed), "{end:?}");
    assert_eq!(*server.asked.lock().unwrap(), [""; 0]);
}

#[test]
fn a_wait_is_between_a_half_and_the_whole_and_not_always_the_same() {
    let waits: Vec<_> = (0..100).map(|_| by_chance(STEADY)).collect();
    assert!(
        waits
            .iter()
            .all(|wait| (STEADY / 2..=STEADY).contains(wait))
    );
    assert!(waits.iter().any(|wait| *wait != waits[0]));
}

#[test]
fn only_a_refusal_of_the_place_itself_makes_a_list_needed() {
    let forgets = |code| {
        let status = Status::failure("why", "Reason").with_code(code);
        matches!(
            End::of(&kube::Error::Api(status.boxed())),
            End::Forgotten(_)
        )
    };
    assert!([400, 404, 410].into_iter().all(forgets));
    assert!(![401, 403, 429, 502, 503].into_iter().any(forgets));
    let gone = kube::Error::ReadEvents(std::io::ErrorKind::ConnectionReset.into());
    assert!(matches!(End::of(&gone), End::Lost(_)));
}
