//! Gathers facts about the container runtime, the CNI directories and the plugin.

use std::{
    io::Write as _,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use installer::{INPOD_CNI as PLUGIN, Runtime};

use super::{super::facts::Plugin, state::inode};
use crate::host_fs::{HostFs, Observed};

/// The sockets of known runtimes (k3s: from its documentation, "advanced"; others: their defaults).
const SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/cri-dockerd.sock",
];

const PLUGIN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Directories {
    pub(crate) conf: String,
    pub(crate) bin: String,
    pub(crate) source: String,
}

pub(super) fn sockets(root: &HostFs) -> Vec<String> {
    let there = |path: &&str| matches!(inode(root, path), Ok(Some(_)));
    SOCKETS
        .iter()
        .copied()
        .filter(there)
        .map(str::to_owned)
        .collect()
}

/// Returns the configured CNI directories of the runtime, or else the defaults of all runtimes.
pub(super) fn directories(root: &HostFs) -> Directories {
    let (places, unread) = Runtime::find(&root.at("/"), None);
    let mut source = match &places.source {
        Some(file) => format!("from {}", file.display()),
        None => "default of container runtimes".to_owned(),
    };
    for (file, why) in unread {
        source = format!("{source}; cannot read {}: {why}", file.display());
    }
    let bin = places.bin_dirs.first();
    Directories {
        conf: places.conf_dir.display().to_string(),
        bin: bin.map_or_else(
            || "/opt/cni/bin".to_owned(),
            |dir| dir.display().to_string(),
        ),
        source,
    }
}

/// Inspects the plugin's binary, and runs the binary with the command VERSION.
pub(super) fn plugin(root: &HostFs, directory: &str) -> Plugin {
    let path = format!("{directory}/{PLUGIN}");
    let binary = inode(root, &path);
    let answer = match &binary {
        Ok(Some(inode)) if inode.mode & 0o111 != 0 => ask(root, &path),
        Ok(_) | Err(_) => Err("not started".to_owned()),
    };
    Plugin {
        path,
        binary,
        answer,
    }
}

/// Runs the plugin with the command VERSION like a runtime; VERSION changes nothing (CNI spec, "VERSION").
fn ask(root: &HostFs, path: &str) -> Observed<String> {
    let started = Command::new(root.at(path))
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.map_err(|error| format!("cannot start: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A failed write needs no error: a program that does not read stdin is not the plugin, as its answer shows.
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
    Err(format!("exited with {}: {text}", output.status))
}

fn until_ended(child: &mut Child) -> Observed<()> {
    let deadline = Instant::now() + PLUGIN_TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // The call fails if the plugin has already exited.
                child.kill().unwrap_or_default();
                child.wait().map(drop).unwrap_or_default();
                return Err(format!("no answer within {} s", PLUGIN_TIMEOUT.as_secs()));
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
    fn directories_are_those_of_the_runtime_s_own_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostFs::new(dir.path());
        let default = directories(&root);
        assert_eq!(
            (default.conf.as_str(), default.bin.as_str()),
            ("/etc/cni/net.d", "/opt/cni/bin")
        );
        fs::create_dir_all(dir.path().join("etc/crio/crio.conf.d")).unwrap();
        fs::write(
            dir.path().join("etc/crio/crio.conf"),
            "[crio.network]\nnetwork_dir = \"/x\"\nplugin_dirs = [\"/y\"]\n",
        )
        .unwrap();
        fs::write(
            dir.path().join("etc/crio/crio.conf.d/10.conf"),
            "[crio.network]\nnetwork_dir = \"/z\"\n",
        )
        .unwrap();
        let found = directories(&root);
        assert_eq!((found.conf.as_str(), found.bin.as_str()), ("/z", "/y"));
        assert!(found.source.contains("/etc/crio/"), "{}", found.source);
    }
}
