//! Endpoints for inbound ports, like `ingress.defaultEndpoint` of
//! Istio's `Sidecar` (services/docs/facts/istio-sidecar.md, 7.1).

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use crate::error::excerpt;

/// The limit that fits one process argument.
pub(crate) const MAX_PORTS: usize = 64;

/// Of proxy and agent; forwarding to 15000 would expose the admin interface to every client.
const RESERVED_PORTS: [u16; 6] = [15000, 15001, 15006, 15020, 15021, 15090];

/// See unix(7): 108 bytes with the final NUL.
const MAX_PATH_LENGTH: usize = 107;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A port of 127.0.0.1 or ::1.
    Localhost(SocketAddr),
    /// The pod's own address, port only.
    Pod(u16),
    /// An absolute path in the proxy's container.
    Unix(String),
}

/// Parses `PORT=ENDPOINT`, comma-separated. Other ports keep the dialled address.
///
/// # Errors
///
/// Names problem and expected form.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<u16, Endpoint>, String> {
    let mut found = BTreeMap::new();
    for item in text.split(',').map(str::trim) {
        if item.is_empty() && text.trim().is_empty() {
            break;
        }
        let Some((port, endpoint)) = item.split_once('=') else {
            return Err(format!(
                "{} is not PORT=ENDPOINT such as 8080=127.0.0.1:8080",
                excerpt(item)
            ));
        };
        let port = parse_port(port.trim())?;
        if found
            .insert(port, parse_endpoint(endpoint.trim())?)
            .is_some()
        {
            return Err(format!("port {port} is given twice"));
        }
        if found.len() > MAX_PORTS {
            return Err(format!("there are more than {MAX_PORTS} ports"));
        }
    }
    Ok(found)
}

fn parse_port(text: &str) -> Result<u16, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port| is_number && *port > 0);
    let port = port.ok_or_else(|| {
        let found = excerpt(text);
        format!("{found} is not a port; use a number from 1 to 65535")
    })?;
    reject_reserved(port)
}

fn reject_reserved(port: u16) -> Result<u16, String> {
    if RESERVED_PORTS.contains(&port) {
        return Err(format!(
            "port {port} belongs to the proxy; use a port of the application"
        ));
    }
    Ok(port)
}

fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    if let Some(path) = text.strip_prefix("unix://") {
        return parse_unix(path);
    }
    let advice = "use 127.0.0.1:PORT, [::1]:PORT, 0.0.0.0:PORT for the pod's own address, or unix:///PATH; leave the port out to keep the original destination";
    let wrong = || format!("{} is not an endpoint; {advice}", excerpt(text));
    let address: SocketAddr = text.parse().map_err(|_| wrong())?;
    if address.port() == 0 {
        return Err(wrong());
    }
    let port = reject_reserved(address.port())?;
    match address.ip() {
        IpAddr::V4(Ipv4Addr::LOCALHOST) | IpAddr::V6(Ipv6Addr::LOCALHOST) => {
            Ok(Endpoint::Localhost(address))
        }
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) | IpAddr::V6(Ipv6Addr::UNSPECIFIED) => {
            Ok(Endpoint::Pod(port))
        }
        IpAddr::V4(_) | IpAddr::V6(_) => {
            Err(format!("{} is not in the pod; {advice}", excerpt(text)))
        }
    }
}

/// Rejects abstract sockets, and characters with a meaning for the kubelet or a parser.
fn parse_unix(path: &str) -> Result<Endpoint, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    let is_path = path.starts_with('/')
        && path.len() <= MAX_PATH_LENGTH
        && path.bytes().all(is_plain)
        && path
            .split('/')
            .skip(1)
            .all(|part| !matches!(part, "" | "." | ".."));
    is_path.then(|| Endpoint::Unix(path.to_owned())).ok_or_else(|| {
        let found = excerpt(path);
        format!(
            "{found} is not a socket path; use an absolute path of letters, digits and ._- of at most {MAX_PATH_LENGTH} bytes, such as unix:///run/app.sock"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_is_read() {
        let text = "8080=127.0.0.1:80, 8081=[::1]:81,8082=0.0.0.0:82,8083=[::]:83 , 8084=unix:///run/a-b/c_d.sock";
        let localhost = |text: &str| Endpoint::Localhost(text.parse().unwrap());
        let wanted = [
            (8080, localhost("127.0.0.1:80")),
            (8081, localhost("[::1]:81")),
            (8082, Endpoint::Pod(82)),
            (8083, Endpoint::Pod(83)),
            (8084, Endpoint::Unix("/run/a-b/c_d.sock".to_owned())),
        ];
        assert_eq!(parse(text).unwrap(), BTreeMap::from(wanted));
        for nothing in ["", " "] {
            assert_eq!(parse(nothing).unwrap(), BTreeMap::new());
        }
    }

    #[test]
    fn what_is_not_an_endpoint_of_the_pod_is_rejected_with_the_reason() {
        let long = format!("1=unix:///{}", "a".repeat(107));
        let many: Vec<_> = (1..=65).map(|port| format!("{port}=0.0.0.0:1")).collect();
        let many = many.join(",");
        for (text, words) in [
            ("8080", "not PORT=ENDPOINT"),
            ("1=0.0.0.0:1,", "not PORT=ENDPOINT"),
            ("http=0.0.0.0:1", "\"http\" is not a port"),
            ("0=0.0.0.0:1", "not a port"),
            ("+1=0.0.0.0:1", "not a port"),
            ("65536=0.0.0.0:1", "not a port"),
            ("1=0.0.0.0:1,1=0.0.0.0:2", "port 1 is given twice"),
            ("1=", "not an endpoint"),
            ("1=127.0.0.1", "not an endpoint"),
            ("1=127.0.0.1:0", "not an endpoint"),
            ("1=127.0.0.1:65536", "not an endpoint"),
            ("1=localhost:1", "not an endpoint"),
            ("1=10.0.0.1:1", "not in the pod"),
            ("1=127.0.0.6:1", "not in the pod"),
            ("1=[::ffff:127.0.0.1]:1", "not in the pod"),
            ("1=127.0.0.1:15000", "port 15000 belongs to the proxy"),
            ("1=0.0.0.0:15001", "port 15001 belongs to the proxy"),
            ("15006=127.0.0.1:1", "port 15006 belongs to the proxy"),
            ("1=unix://run/app.sock", "not a socket path"),
            ("1=unix:///", "not a socket path"),
            ("1=unix:///run//app.sock", "not a socket path"),
            ("1=unix:///run/../app.sock", "not a socket path"),
            ("1=unix:///run/$(TOKEN)", "not a socket path"),
            ("1=unix:///run/a\"b", "not a socket path"),
            ("1=unix://@abstract", "not a socket path"),
            (long.as_str(), "not a socket path"),
            (many.as_str(), "more than 64"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
            assert!(why.len() < 400, "{text}: {}", why.len());
        }
    }
}
