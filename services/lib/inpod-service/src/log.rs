mod levels;

use std::{
    io::{self, Write},
    str::FromStr,
    sync::Arc,
};

use anyhow::anyhow;
use tracing::{Level, Subscriber};
use tracing_subscriber::{
    Layer, fmt, layer::SubscriberExt as _, registry, registry::LookupSpan,
    util::SubscriberInitExt as _,
};

pub(crate) use levels::Levels;

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

/// Writes events to standard error, and returns the levels.
pub(crate) fn init(level: Level, format: Format) -> anyhow::Result<Arc<Levels>> {
    let (levels, filter) = Levels::new(level);
    registry()
        .with(filter)
        .with(lines(format, io::stderr))
        .try_init()
        .map_err(|error| anyhow!("cannot start the log: {error}"))?;
    Ok(levels)
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
}
