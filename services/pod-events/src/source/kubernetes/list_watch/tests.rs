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
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tonic::codegen::Bytes;

use super::*;
use crate::source::kubernetes::{
    apply_update, client,
    response_limit::{LimitResponses, MAX_BYTES},
};

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
        reflector(Client::new(service, "default"))
    }
}

fn reflector(client: Client) -> Reflector<Namespaces> {
    let stores = Stores::new(Arc::default());
    Reflector {
        api: Api::all(client.clone()),
        keyed: Api::all(client),
        fields: None,
        page: PAGE_OF_METADATA,
        cache: Arc::new(Cache {
            inventory: watch::Sender::new(Arc::new(stores.inventory())),
            health: watch::Sender::new(None),
            stores: Mutex::new(stores),
        }),
        retry_after: RetryAfter::default(),
        apply: |stores, update| {
            let namespace_labels = Arc::clone(&stores.namespace_labels);
            let observe = |object| super::super::observe_namespace(object, &namespace_labels);
            apply_update(&mut stores.namespaces, "namespaces", update, observe);
        },
        position: Position::Unknown,
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
            matches!(&end, End::Behind(why_behind) if why_behind.contains(&why)),
            "{at}: {end:?}"
        );
        let requests = server.requests.lock().unwrap().clone();
        assert_eq!(requests, ["&fieldSelector=metadata.name%3Dkube-system"]);
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

#[tokio::test(start_paused = true)]
async fn a_silent_watch_of_a_server_that_hangs_resumes_and_of_another_is_listed() {
    for hangs in [false, true] {
        let service = tower::service_fn(move |request: Request<Body>| async move {
            let query = request.uri().query().unwrap_or_default();
            if query.contains("watch=true") {
                let silence = StreamBody::new(stream::pending()).boxed_unsync();
                return Ok::<_, std::io::Error>(Response::new(silence));
            }
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok(list_at(6000, query))
        });
        let mut reflector = reflector(Client::new(service, "default"));
        let began = Instant::now();
        let end = reflector.watch("5000".to_owned()).await;
        let is_right = match &end {
            End::Disconnected(_) => hangs,
            End::Expired(_) => !hangs,
            End::Ended | End::TooLarge(_) | End::Behind(_) => false,
        };
        assert!(is_right, "{hangs}: {end:?}");
        let noticed = Duration::from_secs(WATCH_SECONDS.into()) + WATCH_END_TIMEOUT + CHECK_TIMEOUT;
        assert!(began.elapsed() <= noticed, "{:?}", began.elapsed());
    }
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

#[test]
fn only_a_timeout_with_the_cause_means_a_server_that_is_behind() {
    let is_behind = |causes: &str| {
        let status =
            format!(r#"{{"code":504,"reason":"Timeout","details":{{"causes":[{causes}]}}}}"#);
        let status: Status = serde_json::from_str(&status).unwrap();
        matches!(End::of(&kube::Error::Api(status.boxed())), End::Behind(_))
    };
    assert!(is_behind(r#"{"reason":"ResourceVersionTooLarge"}"#));
    assert!(!is_behind(""));
}

/// The most that a test sends if nothing stops the server.
const ENDLESS_BYTES: usize = 3 * MAX_BYTES;

/// Serves one request with the start of a body and then a chunk again and again, and returns the number of sent bytes.
async fn serve_repeating(mut stream: TcpStream, start: &str, chunk: &[u8]) -> usize {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let head = format!("{head}{start}");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut sent = 0;
    while sent < ENDLESS_BYTES && stream.write_all(chunk).await.is_ok() {
        sent += chunk.len();
    }
    sent
}

/// Returns a reflector with the client of the source, and the server, which answers this many requests and returns the
/// number of bytes sent to the last.
async fn with_repeating_server(
    requests: usize,
    start: &'static str,
    chunk: Vec<u8>,
) -> (Reflector<Namespaces>, tokio::task::JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         users: [{{name: u, user: {{}}}}]\ncurrent-context: c\n"
    );
    std::fs::write(kubeconfig.path(), text).unwrap();
    let connection = client(Some(kubeconfig.path())).await.unwrap();
    let served = tokio::spawn(async move {
        let mut sent = 0;
        for _ in 0..requests {
            let (stream, _) = listener.accept().await.unwrap();
            sent = serve_repeating(stream, start, &chunk).await;
        }
        sent
    });
    (reflector(connection.client), served)
}

fn assert_too_large(end: &End, sent: usize, what: &str) {
    let why = format!("{what} has more than {MAX_BYTES} bytes");
    assert!(
        matches!(end, End::TooLarge(found) if found.contains(&why)),
        "{end:?}"
    );
    // The kernel's socket buffers hold a few megabytes, too.
    assert!(sent < 2 * MAX_BYTES, "{sent} bytes");
}

#[tokio::test]
async fn a_watch_event_without_an_end_is_refused_at_16_mib() {
    let chunk = vec![b'x'; 64 << 10];
    let (mut reflector, served) = with_repeating_server(1, r#"{"type":""#, chunk).await;
    let end = reflector.watch("5000".to_owned()).await;
    assert_too_large(&end, served.await.unwrap(), "an event of a watch");
}

#[tokio::test]
async fn lists_and_pages_are_refused_at_16_mib_even_with_line_ends() {
    let mut chunk = vec![b'x'; 64 << 10];
    chunk.push(b'\n');
    let (mut reflector, served) = with_repeating_server(2, r#"{"kind":""#, chunk).await;
    reflector.page = 1;
    let end = reflector.list().await.unwrap_err();
    assert_too_large(&end, served.await.unwrap(), "a response");
}

#[tokio::test]
async fn a_watch_may_send_more_than_16_mib_in_many_events() {
    let padding = "x".repeat(1 << 20);
    let metadata = format!(r#"{{"name":"shop","resourceVersion":"5001","uid":"{padding}"}}"#);
    let object = format!(r#"{{"kind":"Namespace","apiVersion":"v1","metadata":{metadata}}}"#);
    let event = format!("{{\"type\":\"MODIFIED\",\"object\":{object}}}\n");
    let (mut reflector, served) = with_repeating_server(1, "", event.into_bytes()).await;
    let end = reflector.watch("5000".to_owned()).await;
    assert!(matches!(end, End::Ended), "{end:?}");
    assert!(served.await.unwrap() >= ENDLESS_BYTES);
    assert_eq!(reflector.position, Position::At("5001".to_owned()));
}

/// Returns namespaces with a megabyte each: a page as a query asks, or all.
fn page_of_large_namespaces(query: &str, total: usize) -> String {
    let parameter = |name: &str| {
        let mut parts = query.split('&');
        parts.find_map(|part| part.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    };
    let (limit, from): (usize, usize) = (
        parameter("limit").unwrap_or(total),
        parameter("continue").unwrap_or(0),
    );
    let to = total.min(from + limit);
    let padding = "x".repeat(1 << 20);
    let item = |at| {
        format!(
            r#"{{"metadata":{{"name":"ns-{at}","uid":"{at}","resourceVersion":"7","annotations":{{"a":"{padding}"}}}}}}"#
        )
    };
    let items: Vec<_> = (from..to).map(item).collect();
    let rest = if to < total {
        to.to_string()
    } else {
        String::new()
    };
    let head = r#"{"kind":"List","apiVersion":"v1","metadata""#;
    format!(
        r#"{head}:{{"resourceVersion":"8","continue":"{rest}"}},"items":[{}]}}"#,
        items.join(",")
    )
}

#[tokio::test]
async fn a_page_over_16_mib_is_listed_in_smaller_pages() {
    const TOTAL: usize = 20;
    let queries = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&queries);
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default();
        seen.lock().unwrap().push(query.to_owned());
        let page = whole(page_of_large_namespaces(query, TOTAL));
        std::future::ready(Ok::<_, std::io::Error>(Response::new(page)))
    });
    let mut reflector = reflector(Client::new(LimitResponses(service), "default"));
    let version = reflector.list().await.unwrap();
    assert_eq!(version, "8");
    let names = reflector
        .cache
        .stores
        .lock()
        .unwrap()
        .inventory()
        .namespaces
        .len();
    assert_eq!(names, TOTAL);
    let queries = queries.lock().unwrap();
    assert!(queries[0].contains("resourceVersion=0"), "{queries:?}");
    // The watch cache would ignore the limit of a list with a version.
    let pages = ["&limit=500", "&limit=50", "&limit=5", "&limit=5&continue=5"];
    assert_eq!(queries[1..5], pages);
    assert_eq!(queries.len(), 7, "{queries:?}");
}

/// Answers lists as an API server whose cache and store are at a version: a higher version is too large.
fn list_at(at: u64, query: &str) -> Response<ResponseBody> {
    let mut parts = query.split('&');
    let wanted = parts.find_map(|part| part.strip_prefix("resourceVersion="));
    if wanted.is_none_or(|wanted| wanted.parse::<u64>().unwrap() <= at) {
        let list = r#"{"kind":"List","apiVersion":"v1","items":[],"metadata""#;
        return Response::new(whole(format!(r#"{list}:{{"resourceVersion":"{at}"}}}}"#)));
    }
    let cause = r#"{"reason":"ResourceVersionTooLarge","message":"Too large resource version"}"#;
    let status = r#"{"kind":"Status","status":"Failure","code":504,"reason":"Timeout","message":"Too large""#;
    let refusal = format!(r#"{status},"details":{{"causes":[{cause}]}}}}"#);
    let mut refusal = Response::new(whole(refusal));
    *refusal.status_mut() = http::StatusCode::GATEWAY_TIMEOUT;
    refusal
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_is_listed_after_it_refused_the_version() {
    let queries = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&queries);
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default();
        let answer = if query.contains("watch=true") {
            Response::new(StreamBody::new(stream::pending()).boxed_unsync())
        } else {
            seen.lock().unwrap().push(query.to_owned());
            list_at(3000, query)
        };
        std::future::ready(Ok::<_, std::io::Error>(answer))
    });
    let mut reflector = reflector(Client::new(service, "default"));
    reflector.position = Position::Expired("5000".to_owned());
    let cache = Arc::clone(&reflector.cache);
    cache.update(|stores| stores.namespaces.finish_list(5000));
    let running = tokio::spawn(reflector.run());
    sleep(RETRY.first * 2).await;
    running.abort();
    assert_eq!(
        *queries.lock().unwrap(),
        [
            "&resourceVersion=5000&resourceVersionMatch=NotOlderThan",
            ""
        ]
    );
    let fetched = r#"{"metadata":{"name":"shop","uid":"1","resourceVersion":"3001"}}"#;
    let fetched =
        super::super::observe_namespace(serde_json::from_str(fetched).unwrap(), &[].into());
    let (name, namespace) = fetched.parsed.unwrap();
    cache.update(|stores| {
        stores
            .namespaces
            .insert_fetched(name, fetched.version, namespace);
    });
    let inventory = cache.inventory.borrow().clone();
    assert_eq!(inventory.namespaces.len(), 1, "versions are low again");
}
