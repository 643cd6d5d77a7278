use std::str::FromStr;

use anyhow::anyhow;
use tracing::Level;
use tracing_subscriber::{
    filter::Targets, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Text,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "json" => Ok(Self::Json),
            "text" => Ok(Self::Text),
            other => Err(format!("\"{other}\" is not json or text")),
        }
    }
}

/// Sends events to standard error. Libraries speak only from `warn` on: their debug output is about them, not about pods.
pub(crate) fn init(level: Level, format: Format) -> anyhow::Result<()> {
    let quiet = ["h2", "hyper", "hyper_util", "tonic", "tower", "kube"];
    let targets = Targets::new()
        .with_default(level)
        .with_targets(quiet.map(|name| (name, level.min(Level::WARN))));
    let registry = tracing_subscriber::registry().with(targets);
    let result = match format {
        Format::Json => {
            let layer = fmt::layer()
                .json()
                .flatten_event(true)
                .with_current_span(true)
                .with_span_list(false);
            registry.with(layer.with_writer(std::io::stderr)).try_init()
        }
        Format::Text => registry
            .with(fmt::layer().with_ansi(false).with_writer(std::io::stderr))
            .try_init(),
    };
    result.map_err(|error| anyhow!("cannot start the log: {error}"))
}
