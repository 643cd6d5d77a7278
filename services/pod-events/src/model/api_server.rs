//! The API server as seen by pod-events: the server takes patches of pods' annotations and conditions,
//! and no Events.

use std::{future::pending, io};

use http::{Request, Response, StatusCode};
use http_body_util::Full;
use inpod_types::keys;
use kube::{Client, client::Body};
use serde_json::Value;
use tonic::codegen::Bytes;

use super::node::{NAMES, Node, Patching, SharedNode, uid};
use crate::pod::ShownCondition;

const POD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{}}"#;

pub(super) fn client(node: &SharedNode) -> Client {
    let node = node.clone();
    let service = tower::service_fn(move |request| answer(node.clone(), request));
    Client::new(service, "default")
}

async fn answer(
    node: SharedNode,
    request: Request<Body>,
) -> Result<Response<Full<Bytes>>, io::Error> {
    let (parts, body) = request.into_parts();
    let name = parts
        .uri
        .path()
        .strip_prefix("/api/v1/namespaces/shop/pods/");
    let name = name.and_then(|path| path.strip_suffix("/status"));
    let pod = NAMES.iter().position(|known| name == Some(*known));
    let body = body.collect_bytes().await.map_err(io::Error::other)?;
    let status = match pod {
        Some(pod) => patch(&node, pod, &serde_json::from_slice(&body)?),
        None => Some(StatusCode::NOT_FOUND),
    };
    let Some(status) = status else {
        return pending().await;
    };
    let text = if status == StatusCode::OK {
        POD.to_owned()
    } else {
        format!(
            r#"{{"kind":"Status","status":"Failure","code":{}}}"#,
            status.as_u16()
        )
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    Ok(response)
}

/// Returns `None` if there is no answer.
fn patch(node: &SharedNode, pod: usize, change: &Value) -> Option<StatusCode> {
    let mut node = node.lock();
    node.count_call();
    node.step();
    let annotation = change["metadata"]["annotations"].get(keys::REDIRECTION);
    let condition = change.pointer("/status/conditions/0").map(condition);
    let patching = node.patching;
    node.note(|| {
        format!(
            "  Patch {} {annotation:?} {condition:?} ({patching:?})",
            NAMES[pod]
        )
    });
    if node.dead || patching == Patching::Hangs {
        return None;
    }
    if patching == Patching::Refused {
        return Some(StatusCode::FORBIDDEN);
    }
    let object = &mut node.pods[pod];
    let is_same = change["metadata"]["uid"] == uid(pod, object.generation);
    if !object.shown || !is_same {
        return Some(StatusCode::NOT_FOUND);
    }
    if let Some(annotation) = annotation {
        object.annotation = annotation.as_str().map(str::to_owned);
    }
    let is_proven = matches!(&condition, Some(Some(it)) if it.status == "True");
    if let Some(condition) = condition {
        object.condition = condition;
    }
    if (annotation.is_some() && object.is_announced()) || (is_proven && !object.sidecar) {
        check_acknowledged(&mut node, pod);
    }
    node.publish();
    node.step();
    if node.dead {
        return None;
    }
    Some(match patching {
        Patching::AnswerLost => StatusCode::INTERNAL_SERVER_ERROR,
        Patching::Works | Patching::Refused | Patching::Hangs => StatusCode::OK,
    })
}

/// Returns the condition after the patch.
fn condition(patch: &Value) -> Option<ShownCondition> {
    let text = |name: &str| patch[name].as_str().map(str::to_owned);
    Some(ShownCondition {
        status: text("status")?,
        reason: text("reason")?,
    })
}

/// Checks that ztunnel serves a pod with the annotation or a true condition, because peers that see the annotation
/// use HBONE with the pod.
fn check_acknowledged(node: &mut Node, pod: usize) {
    let generation = node.pods[pod].generation;
    let mut sandboxes = node.sandboxes.iter();
    let is_served =
        sandboxes.any(|it| it.pod == pod && it.generation == generation && it.acknowledged);
    if !is_served {
        let name = NAMES[pod];
        node.violate(format!(
            "{name} is announced before ztunnel has acknowledged it"
        ));
    }
}
