//! Why a pod that is to be injected is not.

/// Told to whoever makes the pod: each says what to correct.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// An annotation of the pod.
    #[error("annotation {annotation}: {why}")]
    Annotation {
        /// Its name.
        annotation: &'static str,
        /// What is wrong with it, and what to give.
        why: String,
    },
    /// What is no pod.
    #[error("not a pod that can be injected: {0}")]
    InvalidPod(String),
    /// A template that is not configured.
    #[error(
        "template {0:?} is not configured; annotation inject.istio.io/templates or defaultTemplates names it"
    )]
    UnknownTemplate(String),
    /// A template that comes to something else than a part of a pod.
    #[error("template {template:?} does not fit this pod: {why}")]
    Template {
        /// Its name.
        template: String,
        /// What is wrong.
        why: String,
    },
}

impl InjectError {
    pub(crate) fn annotation(annotation: &'static str, why: &impl ToString) -> Self {
        Self::Annotation {
            annotation,
            why: why.to_string(),
        }
    }
}

/// What YAML has to say of a text, without the part of the text that it shows.
pub(crate) fn yaml_error(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    text.lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect()
}

/// As much of a text as is worth telling.
pub(crate) fn excerpt(text: &str) -> String {
    let start: String = text.chars().take(64).collect();
    format!("{start:?}")
}
