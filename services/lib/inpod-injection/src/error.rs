//! Reasons why a pod cannot be injected.

/// Shown to the author of the pod: each message names what to correct.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    #[error("annotation {annotation}: {why}")]
    Annotation {
        annotation: &'static str,
        /// The problem and the expected value.
        why: String,
    },
    /// The object is not a valid pod.
    #[error("not a pod that can be injected: {0}")]
    InvalidPod(String),
    /// The pod names a template that is not configured.
    #[error(
        "template {0:?} is not configured; annotation inject.istio.io/templates or defaultTemplates names it"
    )]
    UnknownTemplate(String),
    /// A template renders to something that is not part of a pod.
    #[error("template {template:?} does not fit this pod: {why}")]
    Template { template: String, why: String },
}

impl InjectError {
    pub(crate) fn annotation(annotation: &'static str, why: &impl ToString) -> Self {
        Self::Annotation {
            annotation,
            why: why.to_string(),
        }
    }
}

/// Returns the message of a YAML error without the excerpt of the text.
pub(crate) fn yaml_error(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    text.lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect()
}

/// Returns the quoted start of a text for an error message.
pub(crate) fn excerpt(text: &str) -> String {
    let start: String = text.chars().take(64).collect();
    format!("{start:?}")
}
