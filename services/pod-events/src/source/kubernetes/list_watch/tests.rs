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
use crate::source::kubernetes::apply_update;

type Namespaces = PartialObjectMeta<k8s::Namespace>;
type ResponseBody = UnsyncBoxBody<Bytes, std::io::Error>;

fn whole(text: String) -> ResponseBody {
    let body = Full::new(Bytes::from(text));
    body.map_err(|never| match never {}).boxed_unsync()
}

#[derive(Clone, Copy, Debug)]
enum WatchBehavior {
    Silent,
    Bookmark,
}

/// A server at a version; `None` if the server refuses the request.
#[derive(Clone, Debug)]
struct Server {
    at: Option<u64>,
    behavior: WatchBehavior,
    /// The requests other than watches.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(at: Option<u64>, behavior: WatchBehavior) -> Self {
        let requests = Arc::default();
        Self {
            at,
            behavior,
            requests,
        }
    }

    fn answer(&self, query: &str) -> Response<ResponseBody> {
        let mut parts = query.split('&');
        if let Some(lasts) = parts.find_map(|part| part.strip_prefix("timeoutSeconds=")) {
            return Response::new(self.watched(Duration::from_secs(lasts.parse().unwrap())));
        }
        self.requests.lock().unwrap().push(query.to_owned());
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

    fn watched(&self, lasts: Duration) -> ResponseBody {
        let text = match self.behavior {
            WatchBehavior::Silent => String::new(),
            WatchBehavior::Bookmark => {
                let object = r#"{"kind":"Namespace","apiVersion":"v1","metadata""#;
                let object = format!(r#"{object}:{{"resourceVersion":"5001"}}}}"#);
                format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n")
            }
        };
        let chunk = stream::iter([Ok::<_, std::io::Error>(Frame::data(Bytes::from(text)))]);
        let end = stream::once(async move {
            sleep(lasts).await;
            Ok(Frame::data(Bytes::new()))
        });
        StreamBody::new(chunk.chain(end)).boxed_unsync()
    }

    fn reflector(&self) -> Reflector<Namespaces> {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let answer = server.answer(request.uri().query().unwrap_or_default());
            std::future::ready(Ok::<_, std::io::Error>(answer))
        });
        let stores = Stores::new(Arc::default());
        Reflector {
            api: Api::all(Client::new(service, "default")),
            fields: None,
            page: PAGE_OF_METADATA,
            cache: Arc::new(Cache {
                inventory: watch::Sender::new(Arc::new(stores.inventory())),
                health: watch::Sender::new(None),
                stores: Mutex::new(stores),
            }),
            liveness: Arc::new(Liveness::new()),
            retry_after: RetryAfter::default(),
            apply: |stores, update| {
                let namespace_labels = Arc::clone(&stores.namespace_labels);
                let observe = |object| super::super::observe_namespace(object, &namespace_labels);
                apply_update(&mut stores.namespaces, "namespaces", update, observe);
            },
            version: None,
        }
    }
}

async fn end_of_watch(server: &Server) -> End {
    server.reflector().watch("5000".to_owned()).await
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_behind_the_version_of_a_watch_is_listed_again() {
    for at in [1, 4999] {
        let server = Server::new(Some(at), WatchBehavior::Silent);
        let end = end_of_watch(&server).await;
        let why = format!("version {at},");
        assert!(
            matches!(&end, End::Expired(why_expired) if why_expired.contains(&why)),
            "{at}: {end:?}"
        );
        let requests = server.requests.lock().unwrap().clone();
        assert!(
            requests.len() == 1 && requests[0].contains("limit=1"),
            "{requests:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_at_the_version_of_a_quiet_watch_or_that_refuses_to_show_it_is_not_listed() {
    for at in [Some(5000), Some(6000), None] {
        let end = end_of_watch(&Server::new(at, WatchBehavior::Silent)).await;
        assert!(matches!(end, End::Ended), "{at:?}: {end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_sent_a_bookmark_is_not_asked_for_its_version() {
    let server = Server::new(Some(1), WatchBehavior::Bookmark);
    let end = end_of_watch(&server).await;
    assert!(matches!(end, End::Ended), "{end:?}");
    assert_eq!(*server.requests.lock().unwrap(), [""; 0]);
}

#[test]
fn a_wait_is_between_a_half_and_the_whole_and_not_always_the_same() {
    let waits: Vec<_> = (0..100).map(|_| with_jitter(STABLE_AFTER)).collect();
    assert!(
        waits
            .iter()
            .all(|wait| (STABLE_AFTER / 2..=STABLE_AFTER).contains(wait))
    );
    assert!(waits.iter().any(|wait| *wait != waits[0]));
}

#[test]
fn only_a_refusal_of_the_version_itself_requires_a_list() {
    let expires = |code| {
        let status = Status::failure("why", "Reason").with_code(code);
        matches!(End::of(&kube::Error::Api(status.boxed())), End::Expired(_))
    };
    assert!([400, 404, 410].into_iter().all(expires));
    assert!(![401, 403, 429, 502, 503].into_iter().any(expires));
    let gone = kube::Error::ReadEvents(std::io::ErrorKind::ConnectionReset.into());
    assert!(matches!(End::of(&gone), End::Disconnected(_)));
}
