//! Translates AdmissionReviews (admission.k8s.io/v1 and v1beta1) to requests for injection, and the results to
//! responses.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use inpod_injection::{Injector, Request, SkipReason};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

const GROUP: &str = "admission.k8s.io/";

/// The version of responses to reviews of an unknown version; API servers support this version since 1.22.
const V1: &str = "admission.k8s.io/v1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Injected,
    /// The pod was injected before, so the patch is empty.
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
struct AdmissionRequest<'a> {
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

#[derive(Debug, Default)]
struct Response {
    allowed: bool,
    message: Option<String>,
    patch: Option<String>,
    operations: usize,
    warning: Option<String>,
}

impl<'a> Review<'a> {
    /// Decodes the body of a request.
    ///
    /// # Errors
    ///
    /// The error is a message for the client.
    pub fn parse(body: &'a [u8]) -> Result<Self, String> {
        let review: Self = serde_json::from_slice(body)
            .map_err(|error| format!("the body is not an AdmissionReview: {error}"))?;
        let is_known = matches!(
            review.api_version.strip_prefix(GROUP),
            Some("v1" | "v1beta1")
        );
        if review.kind != "AdmissionReview" || !is_known {
            let (kind, version) = (excerpt(&review.kind), excerpt(&review.api_version));
            return Err(format!(
                "kind {kind} of {version} is not an AdmissionReview of admission.k8s.io/v1 or v1beta1"
            ));
        }
        if review.request.is_none() {
            return Err("the AdmissionReview has no request".to_owned());
        }
        Ok(review)
    }
}

fn excerpt(text: &str) -> String {
    format!("{:?}", text.chars().take(64).collect::<String>())
}

pub fn answer(injector: &Injector, environment: &[(String, String)], body: &[u8]) -> Answer {
    match Review::parse(body) {
        Ok(review) => {
            let (response, outcome) = inject(injector, environment, &review);
            let uid = review
                .request
                .map(|request| request.uid)
                .unwrap_or_default();
            Answer {
                body: to_admission_response(&review.api_version, &uid, &response),
                outcome,
                uid,
                operations: response.operations,
            }
        }
        Err(why) => Answer {
            body: to_admission_response(V1, "", &denied(why)),
            outcome: Outcome::Undecodable,
            uid: String::new(),
            operations: 0,
        },
    }
}

fn denied(message: String) -> Response {
    Response {
        message: Some(message),
        ..Response::default()
    }
}

fn allowed() -> Response {
    Response {
        allowed: true,
        ..Response::default()
    }
}

/// Injects into new pods and allows all other objects, because denying others would break unrelated requests.
fn inject(
    injector: &Injector,
    environment: &[(String, String)],
    review: &Review<'_>,
) -> (Response, Outcome) {
    let Some(request) = &review.request else {
        return (allowed(), Outcome::OtherKind);
    };
    let Resource { group, resource } = &request.resource;
    let is_part = request
        .sub_resource
        .as_ref()
        .is_some_and(|part| !part.is_empty());
    let is_pod = group.is_empty() && resource == "pods" && !is_part;
    if !is_pod || request.operation != "CREATE" {
        let warning = "inpod's injector received an object that is not a new pod: register its webhook for CREATE of pods only";
        let response = Response {
            warning: Some(warning.to_owned()),
            ..allowed()
        };
        return (response, Outcome::OtherKind);
    }
    let text = request.object.map_or("null", RawValue::get);
    let injected = inpod_injection::parse_pod(text).and_then(|pod| {
        injector.inject(&Request {
            pod: &pod,
            namespace: &request.namespace,
            owner: None,
            environment,
        })
    });
    match injected {
        Ok(inpod_injection::Outcome::Skipped(reason)) => (allowed(), Outcome::Skipped(reason)),
        Ok(inpod_injection::Outcome::Injected { patch, .. }) if patch.0.is_empty() => {
            (allowed(), Outcome::Unchanged)
        }
        Ok(inpod_injection::Outcome::Injected { patch, .. }) => match serde_json::to_string(&patch)
        {
            Ok(text) => {
                let response = Response {
                    patch: Some(text),
                    operations: patch.0.len(),
                    ..allowed()
                };
                (response, Outcome::Injected)
            }
            Err(error) => (denied(error.to_string()), Outcome::Failed),
        },
        Err(error) => (
            denied(format!("inpod cannot inject a sidecar: {error}")),
            Outcome::Refused,
        ),
    }
}

fn to_admission_response(api_version: &str, uid: &str, response: &Response) -> String {
    let Response {
        allowed,
        message,
        patch,
        operations: _,
        warning,
    } = response;
    let mut fields = json!({"uid": uid, "allowed": allowed});
    let more = [
        message
            .as_ref()
            .map(|text| ("status", json!({"message": text}))),
        patch.as_ref().map(|_| ("patchType", json!("JSONPatch"))),
        patch
            .as_ref()
            .map(|text| ("patch", json!(STANDARD.encode(text)))),
        warning.as_ref().map(|text| ("warnings", json!([text]))),
    ];
    if let Some(fields) = fields.as_object_mut() {
        let more = more.into_iter().flatten();
        fields.extend(more.map(|(key, value)| (key.to_owned(), value)));
    }
    json!({"apiVersion": api_version, "kind": "AdmissionReview", "response": fields}).to_string()
}

#[cfg(test)]
mod tests;
