//! Translates AdmissionReviews (admission.k8s.io/v1) to requests for injection, and the results to responses.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use inpod_injection::{Injector, Request, SkipReason, error::excerpt};
use inpod_types::keys;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use crate::path::Change;

const V1: &str = "admission.k8s.io/v1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Injected,
    /// The pod got the readiness gate.
    Gated,
    /// The pod has the sidecar or the gate already, so the patch is empty.
    Unchanged,
    Skipped(SkipReason),
    /// The pod should be injected, but cannot be.
    Refused,
    /// The review is not about a new pod, and is allowed.
    OtherKind,
    Undecodable,
    BadRequest,
    /// The deadline passed before the handling of the review began.
    Overloaded,
    Failed,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Injected => "injected",
            Self::Gated => "gated",
            Self::Unchanged => "unchanged",
            Self::Skipped(_) => "skipped",
            Self::Refused => "refused",
            Self::OtherKind => "other-kind",
            Self::Undecodable => "undecodable",
            Self::BadRequest => "bad-request",
            Self::Overloaded => "overloaded",
            Self::Failed => "failed",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub body: String,
    pub outcome: Outcome,
    /// The UID of the review; empty if the review could not be decoded.
    pub uid: String,
    /// The number of operations in the patch.
    pub operations: usize,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Review<'a> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(borrow)]
    request: Option<AdmissionRequest<'a>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionRequest<'a> {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    resource: Resource,
    #[serde(default)]
    sub_resource: Option<String>,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    operation: String,
    /// The text of the pod, which is parsed after its size is checked.
    #[serde(borrow)]
    object: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
struct Resource {
    #[serde(default)]
    group: String,
    #[serde(default)]
    resource: String,
}

impl<'a> Review<'a> {
    /// Decodes the body of a request.
    ///
    /// # Errors
    ///
    /// The error is a message for the client.
    pub fn parse(body: &'a [u8]) -> Result<AdmissionRequest<'a>, String> {
        let review: Self = serde_json::from_slice(body)
            .map_err(|error| format!("the body is not an AdmissionReview: {error}"))?;
        if review.kind != "AdmissionReview" || review.api_version != V1 {
            let (kind, version) = (excerpt(&review.kind), excerpt(&review.api_version));
            return Err(format!(
                "kind {kind} of {version} is not an AdmissionReview of {V1}"
            ));
        }
        let request = review.request;
        request.ok_or_else(|| "the AdmissionReview has no request".to_owned())
    }
}

pub fn answer(injector: &Injector, change: &Change, body: &[u8]) -> Answer {
    let (uid, (response, outcome, operations)) = match Review::parse(body) {
        Ok(request) => {
            let changed = change_pod(injector, change, &request);
            (request.uid, changed)
        }
        Err(why) => (String::new(), (denied(&why), Outcome::Undecodable, 0)),
    };
    Answer {
        body: to_admission_response(&uid, response),
        outcome,
        uid,
        operations,
    }
}

fn denied(message: &str) -> Value {
    json!({"allowed": false, "status": {"message": message}})
}

fn allowed() -> Value {
    json!({"allowed": true})
}

/// Changes new pods and allows all other objects, because denying others would break unrelated requests. Returns the
/// response, the outcome and the number of operations in the patch.
fn change_pod(
    injector: &Injector,
    change: &Change,
    request: &AdmissionRequest<'_>,
) -> (Value, Outcome, usize) {
    let Resource { group, resource } = &request.resource;
    let is_part = request
        .sub_resource
        .as_ref()
        .is_some_and(|part| !part.is_empty());
    let is_pod = group.is_empty() && resource == "pods" && !is_part;
    if !is_pod || request.operation != "CREATE" {
        let warning = "inpod's injector received an object that is not a new pod: register its webhook for CREATE of pods only";
        let response = json!({"allowed": true, "warnings": [warning]});
        return (response, Outcome::OtherKind, 0);
    }
    match change {
        Change::Inject(environment) => inject(injector, environment, request),
        Change::Gate => gate(request),
    }
}

fn parse_pod(request: &AdmissionRequest<'_>) -> Result<Value, inpod_injection::error::InjectError> {
    inpod_injection::parse_pod(request.object.map_or("null", RawValue::get))
}

/// Adds the readiness gate by which a pod is Ready only while the node agent proves that the pod is in the mesh.
fn gate(request: &AdmissionRequest<'_>) -> (Value, Outcome, usize) {
    let pod = match parse_pod(request) {
        Ok(pod) => pod,
        Err(error) => {
            let why = format!("inpod cannot add a readiness gate: {error}");
            return (denied(&why), Outcome::Refused, 0);
        }
    };
    let gates = pod.pointer("/spec/readinessGates");
    let gates = gates.and_then(Value::as_array);
    let is_ours = |gate: &Value| gate["conditionType"] == keys::IN_MESH;
    if gates.is_some_and(|gates| gates.iter().any(is_ours)) {
        return (allowed(), Outcome::Unchanged, 0);
    }
    let gate = json!({"conditionType": keys::IN_MESH});
    let operation = if gates.is_some() {
        json!({"op": "add", "path": "/spec/readinessGates/-", "value": gate})
    } else {
        json!({"op": "add", "path": "/spec/readinessGates", "value": [gate]})
    };
    let patch = json!([operation]).to_string();
    (patched(patch.as_bytes()), Outcome::Gated, 1)
}

fn patched(patch: &[u8]) -> Value {
    json!({"allowed": true, "patchType": "JSONPatch", "patch": STANDARD.encode(patch)})
}

fn inject(
    injector: &Injector,
    environment: &[(String, String)],
    request: &AdmissionRequest<'_>,
) -> (Value, Outcome, usize) {
    let injected = parse_pod(request).and_then(|pod| {
        injector.inject(&Request {
            pod: &pod,
            namespace: &request.namespace,
            environment,
        })
    });
    match injected {
        Ok(inpod_injection::Outcome::Skipped(why)) => (allowed(), Outcome::Skipped(why), 0),
        Ok(inpod_injection::Outcome::Injected { patch, .. }) if patch.0.is_empty() => {
            (allowed(), Outcome::Unchanged, 0)
        }
        Ok(inpod_injection::Outcome::Injected { patch, .. }) => match serde_json::to_vec(&patch) {
            Ok(text) => (patched(&text), Outcome::Injected, patch.0.len()),
            Err(error) => (denied(&error.to_string()), Outcome::Failed, 0),
        },
        Err(error) => {
            let why = format!("inpod cannot inject a sidecar: {error}");
            (denied(&why), Outcome::Refused, 0)
        }
    }
}

fn to_admission_response(uid: &str, mut response: Value) -> String {
    if let Some(fields) = response.as_object_mut() {
        fields.insert("uid".to_owned(), uid.into());
    }
    json!({"apiVersion": V1, "kind": "AdmissionReview", "response": response}).to_string()
}

#[cfg(test)]
mod tests;
