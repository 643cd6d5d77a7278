//! The text form of a node's CNI files.
//!
//! A comment and settings come first, one per line, then each file behind a line `-- PATH --`. `-- PATH -> TARGET --` is
//! a link, and a path that ends in `/` is a directory. `-- PATH | FILTER --` changes the text of the file: `crlf` ends
//! each line with CR LF, `bom` puts a byte order mark first, `unterminated` drops the last line end, `null` adds a null
//! byte, `padded` adds 3 MiB of spaces, and `latin-1` changes the encoding.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use integration::bin;

use crate::common::installer_host::Host;

/// The installer's answer that is right for an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    Ready,
    /// The installer changes no file of others, adds none, is not ready, and its message has these words.
    Refused(Vec<String>),
    /// The same, but the installer may add a file that runtimes do not load.
    Waits(Vec<String>),
    /// The right answer is not known: the test checks only the properties that hold for every input.
    Either,
}

#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) name: String,
    pub(crate) mode: Option<String>,
    pub(crate) expected: Expected,
    /// The file that inpod copies to a file behind the meta plugin's.
    pub(crate) copied: Option<String>,
    /// True if a meta plugin calls inpod already, so that an uninstall changes the files.
    pub(crate) is_joined: bool,
    /// Further settings of the installer.
    settings: Vec<String>,
    /// The options of cniload, and the directory.
    load: Vec<String>,
    files: Vec<(String, String)>,
}

pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/networks")
}

impl Input {
    /// Reads all inputs, sorted by name.
    pub(crate) fn all() -> Vec<Self> {
        let paths = fs::read_dir(directory())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut inputs: Vec<_> = paths
            .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
            .map(|path| {
                let name = path.file_stem().unwrap().to_str().unwrap();
                Self::parse(name, &fs::read_to_string(&path).unwrap())
            })
            .collect();
        inputs.sort_by(|one, other| one.name.cmp(&other.name));
        inputs
    }

    fn parse(name: &str, text: &str) -> Self {
        let mut input = Self {
            name: name.to_owned(),
            mode: None,
            expected: Expected::Ready,
            copied: None,
            is_joined: false,
            settings: Vec::new(),
            load: vec!["/etc/cni/net.d".to_owned()],
            files: Vec::new(),
        };
        for line in text.split_inclusive('\n') {
            let header = line.trim_end().strip_prefix("-- ");
            match header.and_then(|header| header.strip_suffix(" --")) {
                Some(path) => input.files.push((path.to_owned(), String::new())),
                None => match input.files.last_mut() {
                    Some((_, content)) => content.push_str(line),
                    None => input.set(line.trim_end()),
                },
            }
        }
        input
    }

    fn set(&mut self, line: &str) {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        let words = value.split_whitespace().map(str::to_owned).collect();
        match key {
            "#" => {}
            "mode" => self.mode = Some(value.to_owned()),
            "set" => self.settings = words,
            "load" => self.load = words,
            "joined" => self.is_joined = true,
            "copies" => self.copied = Some(value.to_owned()),
            "refused" => self.expected = Expected::Refused(words),
            "waits" => self.expected = Expected::Waits(words),
            "either" => self.expected = Expected::Either,
            _ => panic!("{}: unknown line {line}", self.name),
        }
    }

    /// Creates the node with the real plugin.
    pub(crate) fn host(&self) -> Host {
        let host = Host::bare(&bin("inpod-cni").unwrap());
        for (path, content) in &self.files {
            lay_out(&host, path, content);
        }
        for dir in ["etc/cni/net.d", "opt/cni/bin"] {
            let path = host.path(dir);
            // A link may lead below the host's root only.
            if !path.is_symlink() {
                fs::create_dir_all(path).unwrap();
            }
        }
        host
    }

    pub(crate) fn settings(&self) -> Vec<String> {
        let mode = self.mode.iter().map(|mode| format!("--mode={mode}"));
        mode.chain(self.settings.iter().cloned()).collect()
    }

    pub(crate) fn load(&self) -> &[String] {
        &self.load
    }

    /// Returns the directory that the runtime loads, below the host's root, with links followed there.
    pub(crate) fn conf_dir(&self, host: &Host) -> PathBuf {
        let dir = self.load.last().unwrap().trim_start_matches('/');
        match fs::read_link(host.path(dir)) {
            Ok(target) => host.path(target.to_str().unwrap().trim_start_matches('/')),
            Err(_) => host.path(dir),
        }
    }
}

fn lay_out(host: &Host, path: &str, content: &str) {
    if let Some((link, target)) = path.split_once(" -> ") {
        let link = host.path(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        return symlink(target, link).unwrap();
    }
    if path.ends_with('/') {
        return fs::create_dir_all(host.path(path)).unwrap();
    }
    let (path, content) = match path.split_once(" | ") {
        None => (path, content.to_owned()),
        Some((path, "crlf")) => (path, content.replace('\n', "\r\n")),
        Some((path, "bom")) => (path, format!("\u{feff}{content}")),
        Some((path, "unterminated")) => (path, content.trim_end().to_owned()),
        Some((path, "null")) => (path, format!("{content}\0")),
        Some((path, "padded")) => (path, content.to_owned() + &" ".repeat(3 << 20)),
        Some((path, "latin-1")) => {
            let bytes = content.chars().map(|letter| u8::try_from(letter).unwrap());
            return write(&host.path(path), bytes.collect::<Vec<_>>());
        }
        Some((path, filter)) => panic!("{path}: unknown filter {filter}"),
    };
    write(&host.path(path), content);
}

fn write(path: &Path, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}
