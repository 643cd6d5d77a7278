//! Parts, each bounded in time, all of them in time and size.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::{redact::Redactor, sink::Sink};
use crate::{arguments::BundleOrder, error::AskError, root::Seen};

/// How long one part may take, and all of them.
const PART: Duration = Duration::from_secs(20);
const WHOLE: Duration = Duration::from_secs(120);

/// How large all of them may be.
const LARGEST: usize = 64 << 20;

/// A part of a bundle, as the manifest lists it.
#[derive(Clone, Debug)]
struct Listed {
    name: String,
    bytes: usize,
    /// Why it is not there, or not whole.
    missing: Option<String>,
}

/// What has been collected.
#[derive(Debug)]
pub(super) struct Collector {
    sink: Sink,
    redactor: Redactor,
    deadline: Instant,
    left: usize,
    listed: Vec<Listed>,
}

impl Collector {
    pub(super) fn new(order: &BundleOrder) -> Result<Self, AskError> {
        Ok(Self {
            sink: Sink::new(&order.output)?,
            redactor: Redactor::new(order.redact_addresses),
            deadline: Instant::now() + WHOLE,
            left: LARGEST,
            listed: Vec::new(),
        })
    }

    /// Adds what is had in time; what is not is listed with its cause.
    pub(super) async fn add(
        &mut self,
        name: &str,
        part: impl Future<Output = Seen<String>>,
    ) -> Result<(), AskError> {
        let until = self.deadline.min(Instant::now() + PART);
        let patience = until.saturating_duration_since(Instant::now());
        if patience.is_zero() {
            return self.list(name, 0, Some("no time was left for it".to_owned()));
        }
        let late = |_elapsed| {
            Err(format!(
                "not had within {} s",
                patience.as_secs_f32().ceil()
            ))
        };
        let had = timeout(patience, part).await.unwrap_or_else(late);
        match had {
            Ok(text) => self.put(name, &text),
            Err(why) => self.list(name, 0, Some(why)),
        }
    }

    /// Adds what is there already.
    pub(super) fn put(&mut self, name: &str, text: &str) -> Result<(), AskError> {
        let text = self.redactor.text(text);
        if text.len() > self.left {
            return self.list(
                name,
                0,
                Some(format!("no room was left for its {} bytes", text.len())),
            );
        }
        self.left -= text.len();
        self.sink.put(name, text.as_bytes())?;
        self.list(name, text.len(), None)
    }

    /// Says that a part is not there.
    pub(super) fn miss(&mut self, name: &str, why: &str) -> Result<(), AskError> {
        self.list(name, 0, Some(why.to_owned()))
    }

    fn list(&mut self, name: &str, bytes: usize, missing: Option<String>) -> Result<(), AskError> {
        // Causes quote what was read.
        let missing = missing.map(|why| self.redactor.text(&why));
        self.listed.push(Listed {
            name: name.to_owned(),
            bytes,
            missing,
        });
        Ok(())
    }

    /// Writes the manifest; a line for people.
    pub(super) fn finish(mut self) -> Result<String, AskError> {
        let shown = |part: &Listed| json!({"name": part.name, "bytes": part.bytes, "missing": part.missing});
        let parts: Vec<_> = self.listed.iter().map(shown).collect();
        let manifest = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "redacted": self.redactor.describe(),
            "parts": parts,
        });
        let missing = self.listed.iter().filter(|part| part.missing.is_some());
        let (missing, all) = (missing.count(), self.listed.len());
        self.sink
            .put("manifest.json", format!("{manifest:#}\n").as_bytes())?;
        let path = self.sink.finish()?;
        Ok(format!(
            "{}: {} parts, {missing} of them missing; manifest.json says which and why",
            path.display(),
            all
        ))
    }
}
