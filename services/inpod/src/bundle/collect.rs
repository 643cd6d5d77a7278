//! Collects parts within limits of time and size.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::{redact::Redactor, sink::Sink};
use crate::{arguments::BundleOptions, error::CommandError, host_fs::Observed};

/// The limits of one part, and of all parts together.
const PART_TIMEOUT: Duration = Duration::from_secs(20);
const TOTAL_TIMEOUT: Duration = Duration::from_secs(120);

/// The limit of all redacted parts together.
const MAX_TOTAL_BYTES: usize = 64 << 20;

#[derive(Clone, Debug)]
struct ManifestEntry {
    name: String,
    bytes: usize,
    missing: Option<String>,
}

#[derive(Debug)]
pub(super) struct Collector {
    sink: Sink,
    redactor: Redactor,
    deadline: Instant,
    left: usize,
    entries: Vec<ManifestEntry>,
}

impl Collector {
    pub(super) fn new(options: &BundleOptions) -> Result<Self, CommandError> {
        Ok(Self {
            sink: Sink::new(&options.output)?,
            redactor: Redactor::new(options.redact_addresses),
            deadline: Instant::now() + TOTAL_TIMEOUT,
            left: MAX_TOTAL_BYTES,
            entries: Vec::new(),
        })
    }

    /// Collects the part, or lists the part as missing if it does not arrive in time.
    pub(super) async fn add(
        &mut self,
        name: &str,
        part: impl Future<Output = Observed<String>>,
    ) -> Result<(), CommandError> {
        let until = self.deadline.min(Instant::now() + PART_TIMEOUT);
        let remaining = until.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return self.list(name, 0, Some("no time left".to_owned()));
        }
        let late = |_elapsed| {
            Err(format!(
                "not collected within {} s",
                remaining.as_secs_f32().ceil()
            ))
        };
        let collected = timeout(remaining, part).await.unwrap_or_else(late);
        match collected {
            Ok(text) => self.put(name, &text),
            Err(why) => self.list(name, 0, Some(why)),
        }
    }

    pub(super) fn put(&mut self, name: &str, text: &str) -> Result<(), CommandError> {
        let text = self.redactor.redact_text(text);
        if text.len() > self.left {
            return self.list(
                name,
                0,
                Some(format!("no room left for its {} bytes", text.len())),
            );
        }
        self.left -= text.len();
        self.sink.put(name, text.as_bytes())?;
        self.list(name, text.len(), None)
    }

    pub(super) fn add_missing(&mut self, name: &str, why: &str) -> Result<(), CommandError> {
        self.list(name, 0, Some(why.to_owned()))
    }

    fn list(
        &mut self,
        name: &str,
        bytes: usize,
        missing: Option<String>,
    ) -> Result<(), CommandError> {
        // An error may quote the content of a file or a response, so errors are redacted like parts.
        let missing = missing.map(|why| self.redactor.redact_text(&why));
        self.entries.push(ManifestEntry {
            name: name.to_owned(),
            bytes,
            missing,
        });
        Ok(())
    }

    /// Writes the manifest and returns a summary of the bundle.
    pub(super) fn finish(mut self) -> Result<String, CommandError> {
        let shown = |part: &ManifestEntry| json!({"name": part.name, "bytes": part.bytes, "missing": part.missing});
        let parts: Vec<_> = self.entries.iter().map(shown).collect();
        let manifest = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "redacted": self.redactor.describe(),
            "parts": parts,
        });
        let missing = self.entries.iter().filter(|part| part.missing.is_some());
        let (missing, all) = (missing.count(), self.entries.len());
        self.sink
            .put("manifest.json", format!("{manifest:#}\n").as_bytes())?;
        let path = self.sink.finish()?;
        Ok(format!(
            "wrote {}: {} parts, {missing} missing (manifest.json lists them with the reason)",
            path.display(),
            all
        ))
    }
}
