use std::{path::PathBuf, str::FromStr, time::Duration};

use http::Uri;
use tonic::transport::{Channel, Endpoint as Transport};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// The service creates no spans.
    Disabled,
    /// The collector's host and port, without TLS.
    Http(Uri),
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::Disabled);
        }
        let wrong = || format!("\"{text}\" is not http://HOST:PORT or unix:/PATH");
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return Some(path)
                .filter(|path| path.is_absolute())
                .map(Self::Unix)
                .ok_or_else(wrong);
        }
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        is_host_and_port(&uri)
            .then_some(Self::Http(uri))
            .ok_or_else(wrong)
    }
}

/// Rejects passwords, because settings are printed, and paths, because gRPC has none.
fn is_host_and_port(uri: &Uri) -> bool {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    uri.scheme_str() == Some("http")
        && uri.port_u16().is_some_and(|port| port > 0)
        && uri.host().is_some_and(|host| !host.is_empty())
        && !authority.contains('@')
        && uri.path() == "/"
        && uri.query().is_none()
}

impl Endpoint {
    pub(super) fn channel(&self) -> Option<Channel> {
        match self {
            Self::Disabled => None,
            Self::Unix(socket) => Some(crate::channel(socket)),
            Self::Http(uri) => {
                let transport = Transport::from(uri.clone());
                let transport = transport.connect_timeout(Duration::from_secs(2));
                Some(transport.connect_lazy())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_and_port_or_a_socket() {
        assert_eq!("".parse(), Ok(Endpoint::Disabled));
        let socket = Endpoint::Unix("/run/otel.sock".into());
        assert_eq!("unix:/run/otel.sock".parse(), Ok(socket));
        for text in [
            "http://127.0.0.1:4317",
            "http://[::1]:4317",
            "http://collector.observability.svc:4317/",
        ] {
            let uri = text.parse().unwrap();
            assert_eq!(text.parse(), Ok(Endpoint::Http(uri)));
        }
    }

    #[test]
    fn what_is_neither_is_refused_with_the_shape_of_both() {
        for text in [
            "127.0.0.1:4317",
            "https://collector:4317",
            "http://collector",
            "http://collector:0",
            "http://:4317",
            "http://user:secret@collector:4317",
            "http://collector:4317/v1/traces",
            "http://collector:4317?a=b",
            "unix:",
            "unix:otel.sock",
            "/run/otel.sock",
            " ",
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.contains("http://HOST:PORT or unix:/PATH"), "{error}");
        }
    }
}
