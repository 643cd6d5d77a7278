//! The container runtime: whether there is one, which directories it reads, and whether the plugin that it will start
//! works.

use std::{
    io::Write as _,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{chain::PLUGIN, facts::Plugin},
    state::inode,
};
use crate::root::{Root, Seen};

/// Where the sockets of runtimes are known to be (k3s: its documentation, "advanced"; the others: their defaults).
const SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/cri-dockerd.sock",
];

/// Where runtimes are configured, with the keys for networks and for plugins.
const CONFIGURED: [(&str, &str, &str); 3] = [
    (
        "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        "conf_dir",
        "bin_dir",
    ),
    ("/etc/containerd/config.toml", "conf_dir", "bin_dir"),
    ("/etc/crio/crio.conf", "network_dir", "plugin_dirs"),
];

/// Where CRI-O reads more of the same.
const CRIO_MORE: &str = "/etc/crio/crio.conf.d";

/// How long the plugin may take to say which versions it speaks.
const ANSWER: Duration = Duration::from_secs(5);

/// Where networks and plugins are, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Directories {
    pub(crate) conf: String,
    pub(crate) bin: String,
    pub(crate) source: String,
}

/// The sockets of runtimes that are there.
pub(super) fn sockets(root: &Root) -> Vec<String> {
    let there = |path: &&str| matches!(inode(root, path), Ok(Some(_)));
    SOCKETS
        .iter()
        .copied()
        .filter(there)
        .map(str::to_owned)
        .collect()
}

/// What the runtime is configured with, else what all of them default to.
pub(super) fn directories(root: &Root) -> Directories {
    let mut files: Vec<_> = CONFIGURED
        .map(|(file, conf, bin)| (file.to_owned(), conf, bin))
        .into();
    let more = root.names(CRIO_MORE).ok().flatten().unwrap_or_default();
    // The last one that says something counts.
    let more = more
        .into_iter()
        .rev()
        .map(|name| (format!("{CRIO_MORE}/{name}"), "network_dir", "plugin_dirs"));
    files.splice(2..2, more);
    let (mut conf, mut bin) = (None, None);
    let mut sources = Vec::new();
    for (file, conf_key, bin_key) in files {
        let text = root.text(&file).unwrap_or_default();
        let (found_conf, found_bin) = (value(&text, conf_key), value(&text, bin_key));
        if found_conf.is_some() || found_bin.is_some() {
            sources.push(file);
        }
        conf = conf.or(found_conf);
        bin = bin.or(found_bin);
    }
    let source = match sources.as_slice() {
        [] => "where runtimes look unless configured".to_owned(),
        sources => format!("from {}", sources.join(", ")),
    };
    Directories {
        conf: conf.unwrap_or_else(|| "/etc/cni/net.d".to_owned()),
        bin: bin.unwrap_or_else(|| "/opt/cni/bin".to_owned()),
        source,
    }
}

/// The value of a key of TOML that is a string, or the first of a list of strings, wherever it stands in the file: these
/// keys mean nothing else in the files of runtimes. Lists over several lines are understood.
fn value(text: &str, key: &str) -> Option<String> {
    let mut rest = text;
    loop {
        let at = rest.find(key)?;
        let line_start = rest.get(..at)?.rfind('\n').map_or(0, |index| index + 1);
        let before = rest.get(line_start..at)?.trim();
        let after = rest.get(at + key.len()..)?;
        if let Some(value) = before.is_empty().then(|| quoted(after)).flatten() {
            return Some(value);
        }
        rest = after;
    }
}

fn quoted(text: &str) -> Option<String> {
    let value = text.trim_start().strip_prefix('=')?.trim_start();
    let value = value.strip_prefix('[').map_or(value, str::trim_start);
    let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let text = value.get(1..)?.split(quote).next()?;
    (!text.is_empty()).then(|| text.to_owned())
}

/// The plugin's binary, and what it says.
pub(super) fn plugin(root: &Root, directory: &str) -> Plugin {
    let path = format!("{directory}/{PLUGIN}");
    let binary = inode(root, &path);
    let answer = match &binary {
        Ok(Some(inode)) if inode.mode & 0o111 != 0 => ask(root, &path),
        Ok(_) | Err(_) => Err("it was not started".to_owned()),
    };
    Plugin {
        path,
        binary,
        answer,
    }
}

/// Starts it as a runtime does that wants to know its versions (CNI spec, "VERSION"): that touches nothing.
fn ask(root: &Root, path: &str) -> Seen<String> {
    let started = Command::new(root.at(path))
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.map_err(|error| format!("cannot start it: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read it has gone wrong anyhow, and says so by its answer.
        stdin
            .write_all(br#"{"cniVersion":"1.0.0"}"#)
            .unwrap_or_default();
    }
    until_ended(&mut child)?;
    let output = child
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout)
        .chars()
        .take(300)
        .collect::<String>();
    if output.status.success() {
        return Ok(text);
    }
    Err(format!("it ended with {}: {text}", output.status))
}

fn until_ended(child: &mut Child) -> Seen<()> {
    let deadline = Instant::now() + ANSWER;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // It ends now, or has ended.
                child.kill().unwrap_or_default();
                child.wait().map(drop).unwrap_or_default();
                return Err(format!("no answer within {} s", ANSWER.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_key_is_found_wherever_it_stands_and_no_other_for_it() {
        let text = "[plugins.cri.cni]\n  # conf_dir = \"/no\"\n  max_conf_dir = \"/no\"\n  conf_dir = \"/a\"\n  bin_dirs = [\n '/b', '/c' ]\nbin_dir = ''\n";
        assert_eq!(value(text, "conf_dir").as_deref(), Some("/a"));
        assert_eq!(value(text, "bin_dirs").as_deref(), Some("/b"));
        assert_eq!(value(text, "bin_dir"), None);
        assert_eq!(value("", "conf_dir"), None);
    }

    #[test]
    fn directories_are_those_of_the_runtime_s_own_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        let default = directories(&root);
        assert_eq!(
            (default.conf.as_str(), default.bin.as_str()),
            ("/etc/cni/net.d", "/opt/cni/bin")
        );
        fs::create_dir_all(dir.path().join("etc/crio/crio.conf.d")).unwrap();
        fs::write(
            dir.path().join("etc/crio/crio.conf"),
            "network_dir = \"/x\"\nplugin_dirs = [\"/y\"]\n",
        )
        .unwrap();
        fs::write(
            dir.path().join("etc/crio/crio.conf.d/10"),
            "network_dir = \"/z\"\n",
        )
        .unwrap();
        let found = directories(&root);
        assert_eq!((found.conf.as_str(), found.bin.as_str()), ("/z", "/y"));
        assert!(found.source.contains("crio.conf.d/10"), "{}", found.source);
    }
}
