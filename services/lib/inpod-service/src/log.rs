mod levels;

use std::{
    io::{self, Write},
    str::FromStr,
    sync::Arc,
};

use anyhow::anyhow;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, filter_fn},
    fmt,
    layer::SubscriberExt as _,
    registry,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use crate::otlp;
pub(crate) use levels::Levels;
use levels::{Filter, WARN_ONLY_LIBRARIES};

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

/// Writes events to standard error, exports spans if a layer for spans is given, and returns the levels.
pub(crate) fn init(
    level: Level,
    format: Format,
    spans: Option<otlp::Layer>,
) -> anyhow::Result<Arc<Levels>> {
    let (levels, filter) = Levels::new(level);
    let result = match spans {
        None => registry()
            .with(filter)
            .with(lines(format, io::stderr))
            .try_init(),
        Some(spans) => exporting(filter, format, spans).try_init(),
    };
    result.map_err(|error| anyhow!("cannot start the log: {error}"))?;
    Ok(levels)
}

/// Exports spans at any log level, since each output has a filter of its own.
fn exporting(filter: Filter, format: Format, spans: otlp::Layer) -> impl Subscriber + Send + Sync {
    let exported = filter_fn(is_exported).with_max_level_hint(LevelFilter::INFO);
    registry()
        .with(lines(format, io::stderr).with_filter(filter))
        .with(spans.with_filter(exported))
}

fn lines<S, W>(
    format: Format,
    open: impl Fn() -> W + Send + Sync + 'static,
) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: Write + 'static,
{
    match format {
        Format::Json => fmt::layer()
            .with_writer(open)
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .boxed(),
        Format::Text => fmt::layer()
            .with_writer(move || Escaping(open()))
            .with_ansi(false)
            .boxed(),
    }
}

/// Writes each event as one line: foreign text begins no line and controls no terminal.
struct Escaping<W>(W);

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = escape_controls(text.strip_suffix('\n').unwrap_or(&text));
        writeln!(self.0, "{line}")?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Escapes characters in foreign text that would move the cursor or start a new line.
pub fn escape_controls(text: &str) -> String {
    let is_odd =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if is_odd(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped
}

fn is_exported(metadata: &Metadata<'_>) -> bool {
    let is_of_library = |name: &&str| metadata.target().starts_with(name);
    metadata.is_span()
        && *metadata.level() <= Level::INFO
        && !WARN_ONLY_LIBRARIES.iter().any(is_of_library)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Seek as _},
        sync::Arc,
    };

    use tracing::subscriber::with_default;

    use super::*;

    #[test]
    fn text_logs_escape_control_characters_of_all_values() {
        let mut file = tempfile::tempfile().unwrap();
        let shared = Arc::new(file.try_clone().unwrap());
        let subscriber = registry().with(lines(Format::Text, move || Arc::clone(&shared)));
        let foreign = "a\nb\rc\u{1b}[2Jd\u{7}e\u{9b}f\u{7f}g\u{202e}h";
        let cause = io::Error::other(foreign);
        let error = anyhow::Error::from(cause).context(foreign);
        with_default(subscriber, || {
            let _span = tracing::info_span!("call", foreign, shown = %foreign).entered();
            tracing::info!(foreign, shown = %foreign, debug = ?foreign, "{foreign}");
            tracing::error!(error = &*error, shown = %error, "It failed");
        });
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text.lines().count(), 2, "{text:?}");
        assert_eq!(
            escape_controls(&text),
            text.replace('\n', "\\n"),
            "{text:?}"
        );
        assert!(text.matches("a\\nb\\rc").count() >= 7, "{text:?}");
    }

    #[cfg(feature = "otlp")]
    #[test]
    fn spans_are_exported_whatever_is_logged_and_those_of_libraries_and_details_are_not() {
        use http::{HeaderMap, HeaderValue};

        use crate::{TRACEPARENT, Trace};

        let mut headers = HeaderMap::new();
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        headers.insert(TRACEPARENT, HeaderValue::from_static(header));
        let trace = Trace::from_headers(&headers);
        let (layer, mut waiting) = otlp::test_layer();
        let (_levels, filter) = Levels::new(Level::ERROR);
        with_default(exporting(filter, Format::Text, layer), || {
            let call = tracing::info_span!("call");
            otlp::serve(&call, &trace, "/service/Method");
            let _within = call.enter();
            let detail = tracing::debug_span!("detail");
            let _within = detail.enter();
            drop(tracing::info_span!(target: "hyper::client", "library"));
            drop(otlp::child_span("claim", &trace.with_current_span()));
            drop(tracing::info_span!("step"));
        });
        let exported = std::iter::from_fn(|| waiting.try_recv().ok());
        let exported: Vec<_> = exported.collect();
        let names: Vec<_> = exported.iter().map(|span| &*span.name).collect();
        assert_eq!(names, ["claim", "step", "service/Method"]);
        let [claim, step, call] = &*exported else {
            panic!("{names:?}")
        };
        for within in [claim, step] {
            assert_eq!(within.parent_span_id, call.span_id);
        }
    }
}
