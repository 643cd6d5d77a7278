//! The errors of an injection into a pod.

/// An error for the author of the pod, whose message names the part to correct.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    #[error("annotation {annotation}: {why}")]
    Annotation {
        annotation: &'static str,
        why: String,
    },
    #[error("not a pod that can be injected: {0}")]
    InvalidPod(String),
    #[error(
        "template {0:?} is not configured; annotation inject.istio.io/templates or defaultTemplates names it"
    )]
    UnknownTemplate(String),
    /// The rendered template does not fit into a pod.
    #[error("template {template:?} does not fit this pod: {why}")]
    Template { template: String, why: String },
}

impl InjectError {
    pub(crate) fn invalid_annotation(annotation: &'static str, why: &impl ToString) -> Self {
        Self::Annotation {
            annotation,
            why: why.to_string(),
        }
    }
}

/// Formats a YAML error without the parser's excerpt of the text.
pub(crate) fn yaml_error(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    text.lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect()
}

/// Quotes the first characters of a text.
pub fn excerpt(text: &str) -> String {
    let start: String = text.chars().take(64).collect();
    format!("{start:?}")
}
