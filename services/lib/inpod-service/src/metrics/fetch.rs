use std::path::Path;

use http_body_util::{BodyExt as _, Limited};
use tonic::body::Body;
use tower::{Service as _, ServiceExt as _};

use super::PATH;

/// A limit far above the metrics of any service.
const MAX_RESPONSE_BYTES: usize = 4 * 1024 * 1024;

/// Reads another service's metrics from its gRPC socket. The call has a connection of its own, closed when the caller
/// gives up, and the caller has to set a timeout.
///
/// # Errors
///
/// Fails if the service is unreachable or responds with anything but metrics.
pub async fn fetch(socket: &Path) -> Result<String, String> {
    let mut channel = crate::channel(socket);
    let failed = |error: &dyn std::error::Error| format!("{}: {error}", socket.display());
    let request = http::Request::get(PATH).body(Body::empty());
    let request = request.map_err(|error| failed(&error))?;
    let ready = channel.ready().await.map_err(|error| failed(&error))?;
    let answer = ready.call(request).await.map_err(|error| failed(&error))?;
    if answer.status() != http::StatusCode::OK {
        return Err(format!("{} answered {}", socket.display(), answer.status()));
    }
    let body = Limited::new(answer.into_body(), MAX_RESPONSE_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| failed(&*error))?;
    String::from_utf8(body.to_bytes().to_vec()).map_err(|error| failed(&error))
}
