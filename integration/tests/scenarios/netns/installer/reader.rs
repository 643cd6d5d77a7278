//! A runtime that reads configurations continuously, parsed with serde instead of the code under test.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use serde_json::Value;

pub(crate) struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Seen>>,
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) reads: usize,
    /// Invalid network configurations that it read.
    pub(crate) broken: Vec<String>,
    /// Usable configurations without inpod in them.
    pub(crate) without_us: Vec<String>,
}

impl Reader {
    pub(crate) fn of(dir: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let reported = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut seen = Seen::default();
            while !reported.load(Ordering::Relaxed) {
                seen.look(&dir);
            }
            seen
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    pub(crate) fn stop(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Seen {
    fn look(&mut self, dir: &Path) {
        let Ok(entries) = fs::read_dir(dir) else {
            return;
        };
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| is_loaded(name))
            .collect();
        names.sort();
        let mut first = None;
        for name in names {
            let text = match fs::read(dir.join(&name)) {
                Ok(text) => text,
                // Gone since the listing: a runtime reads the directory again.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return,
                Err(error) => panic!("{name}: {error}"),
            };
            match types(&text) {
                Some(types) if first.is_none() => first = Some((name, types)),
                Some(_) => {}
                None => self
                    .broken
                    .push(format!("{name}: {}", String::from_utf8_lossy(&text))),
            }
        }
        self.reads += 1;
        match first {
            Some((_, types)) if types.iter().any(|kind| kind == "inpod-cni") => {}
            Some((name, _)) => self.without_us.push(name),
            None => self.without_us.push("nothing".to_owned()),
        }
    }
}

pub(crate) fn is_loaded(name: &str) -> bool {
    let endings = [".conf", ".conflist", ".json"];
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Returns `None` if it is no configuration. Numbers beyond serde's types are ignored.
pub(crate) fn types(text: &[u8]) -> Option<Vec<String>> {
    let text = String::from_utf8_lossy(text).replace("1e40", "1");
    let value: Value = serde_json::from_str(&text).ok()?;
    if let Some(kind) = value.get("type") {
        return Some(vec![kind.as_str()?.to_owned()]);
    }
    value.get("name")?.as_str()?;
    let plugins = value.get("plugins")?.as_array()?;
    let types = plugins
        .iter()
        .map(|plugin| Some(plugin.get("type")?.as_str()?.to_owned()));
    types
        .collect::<Option<Vec<_>>>()
        .filter(|types| !types.is_empty())
}
