use std::time::Instant;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    task::JoinHandle,
};

use super::*;

/// Echoes the path, except for `/nowhere`, where nothing is served.
#[derive(Clone)]
struct Echo;

impl Handler for Echo {
    async fn get(&self, path: &str) -> Option<Response<Full<Bytes>>> {
        (path != "/nowhere").then(|| response(StatusCode::OK, "text/plain", path.to_owned()))
    }
}

/// Returns a loopback address that no other process of these tests uses.
pub(crate) fn own_address(port: u16) -> SocketAddr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, high, middle, low], port))
}

fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint {
        address,
        content: "echoes",
        condition: "echo-address",
        remedy: "change the port",
    }
}

/// Serves echoes, and waits until the port is bound.
async fn serve(port: u16) -> (SocketAddr, JoinHandle<Infallible>) {
    let (address, readiness) = (own_address(port), Readiness::default());
    let conditions = readiness.clone();
    let served = tokio::spawn(async move { endpoint(address).serve(&conditions, Echo).await });
    while !is_bound(&readiness) {
        tokio::task::yield_now().await;
    }
    (address, served)
}

fn is_bound(readiness: &Readiness) -> bool {
    readiness
        .all()
        .get("echo-address")
        .is_some_and(|condition| condition.ok)
}

/// Sends a request and returns everything up to the end of the connection.
pub(crate) async fn send(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn a_get_is_answered_by_its_path_and_anything_else_refused() {
    let (address, _served) = serve(1).await;
    let end = "HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for (request, status, body) in [
        ("GET /a", "200 OK", "/a"),
        ("GET /a?verbose", "200 OK", "/a"),
        ("GET /nowhere", "404 Not Found", ""),
        ("POST /a", "405 Method Not Allowed", ""),
        ("HEAD /a", "405 Method Not Allowed", ""),
    ] {
        let answer = send(address, &format!("{request} {end}")).await;
        let (head, content) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}\r\n")),
            "{request}: {head}"
        );
        assert_eq!(content, body, "{request}");
    }
    let long = format!("GET /a HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(10_000));
    let answer = send(address, &long).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_request_is_disconnected_in_time() {
    let (address, _served) = serve(2).await;
    let began = Instant::now();
    let answer = send(address, "GET /a HTTP/1.1\r\n").await;
    assert!(!answer.contains("200 OK"), "{answer}");
    let fits = REQUEST_TIMEOUT..CONNECTION_TIMEOUT;
    assert!(fits.contains(&began.elapsed()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn idle_connections_do_not_hold_up_a_probe() {
    let (address, _served) = serve(3).await;
    let began = Instant::now();
    let mut idle = Vec::new();
    for _ in 0..4 * MAX_CONNECTIONS {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let answer = send(address, "GET /probe HTTP/1.1\r\n\r\n").await;
    assert!(answer.ends_with("/probe"), "{answer}");
    let ended = idle[0].read(&mut [0; 16]).await;
    assert!(matches!(ended, Ok(0) | Err(_)), "the oldest is closed");
    assert!(began.elapsed() < REQUEST_TIMEOUT, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_port_that_is_taken_is_a_condition_with_its_remedy_and_served_when_it_is_free() {
    let address = own_address(4);
    let squatter = TcpListener::bind(address).await.unwrap();
    let readiness = Readiness::default();
    let conditions = readiness.clone();
    let _served = tokio::spawn(async move { endpoint(address).serve(&conditions, Echo).await });
    sleep(BIND_RETRY_INTERVAL).await;
    let reported = readiness.all()["echo-address"].message.clone();
    for part in ["echoes", &address.to_string(), "in use", "change the port"] {
        assert!(reported.contains(part), "{part} is not in {reported}");
    }
    assert!(readiness.is_ready(), "pods start nevertheless");
    drop(squatter);
    sleep(2 * BIND_RETRY_INTERVAL).await;
    assert!(is_bound(&readiness));
    tokio::time::resume();
    let answer = send(address, "GET /a HTTP/1.1\r\n\r\n").await;
    assert!(answer.ends_with("/a"), "{answer}");
}

#[test]
fn on_a_kernel_without_ipv6_an_address_for_both_families_is_that_of_ipv4() {
    let unsupported = io::Error::from_raw_os_error(libc::EAFNOSUPPORT);
    let in_use = io::Error::from_raw_os_error(libc::EADDRINUSE);
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let any = address("[::]:15045");
    let instead = Some(address("0.0.0.0:15045"));
    assert_eq!(without_ipv6(any, &unsupported), instead);
    assert_eq!(without_ipv6(any, &in_use), None);
    assert_eq!(without_ipv6(address("[::1]:15045"), &unsupported), None);
}
