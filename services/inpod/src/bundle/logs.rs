//! The logs of inpod's pods on this node.

use std::{
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

use super::archive::Archive;
use crate::{
    error::CommandError,
    host_fs::{HostFs, Observed},
};

/// The most bytes collected of a log; only the end of a longer log is kept.
const MAX_LOG_BYTES: u64 = 2 << 20;

/// The kubelet's log directory, which has a directory per pod (`NAMESPACE_NAME_UID`) and below a directory per
/// container.
const POD_LOG_DIRECTORY: &str = "/var/log/pods";

pub(super) fn add_all(root: &HostFs, to: &mut Archive) -> Result<(), CommandError> {
    let logs = find(root).unwrap_or_else(|why| {
        to.list_missing("logs", &why);
        Vec::new()
    });
    for (name, path) in logs {
        let name = format!("logs/{name}");
        match tail(&root.at(&path)) {
            Ok(text) => to.put(&name, &text)?,
            Err(why) => to.list_missing(&name, &why),
        }
    }
    Ok(())
}

/// Reads the end of a log, from the start of a line.
fn tail(path: &Path) -> Observed<String> {
    let read = || {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let from = length.saturating_sub(MAX_LOG_BYTES);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(MAX_LOG_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        std::io::Result::Ok(if from == 0 { text } else { from_line(&text) })
    };
    read().map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn from_line(text: &str) -> String {
    text.split_once('\n')
        .map_or("", |(_, rest)| rest)
        .to_owned()
}

/// Returns the name in the bundle and the path on the node for each log of inpod's pods.
fn find(root: &HostFs) -> Observed<Vec<(String, String)>> {
    let mut found = Vec::new();
    let pods = root.names(POD_LOG_DIRECTORY)?.unwrap_or_default();
    // Directories of inpod's pods are named NAMESPACE_inpod-HASH_UID, whatever the namespace.
    let is_ours = |pod: &&String| {
        pod.split('_')
            .nth(1)
            .is_some_and(|name| name.starts_with("inpod-"))
    };
    for pod in pods.iter().filter(is_ours) {
        for container in root
            .names(format!("{POD_LOG_DIRECTORY}/{pod}"))?
            .unwrap_or_default()
        {
            let directory = format!("{POD_LOG_DIRECTORY}/{pod}/{container}");
            let files = root.names(&directory).ok().flatten().unwrap_or_default();
            let logs = files.iter().filter(|file| file.ends_with(".log"));
            found.extend(logs.map(|file| {
                let name = pod.split('_').nth(1).unwrap_or_default();
                (
                    format!("{name}-{container}-{file}"),
                    format!("{directory}/{file}"),
                )
            }));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn logs_are_those_of_inpod_s_pods_and_of_long_ones_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostFs::new(dir.path());
        for pod in ["mesh_inpod-abcde_u1", "shop_web_u2", "shop_inpodium_u3"] {
            let container = dir.path().join("var/log/pods").join(pod).join("netconfig");
            fs::create_dir_all(&container).unwrap();
            fs::write(container.join("0.log"), "text\n").unwrap();
        }
        let found = find(&root).unwrap();
        let path = "/var/log/pods/mesh_inpod-abcde_u1/netconfig/0.log";
        assert_eq!(
            found,
            [("inpod-abcde-netconfig-0.log".to_owned(), path.to_owned())]
        );
        let long = dir.path().join("long");
        fs::write(&long, format!("{}\nlast\n", "x".repeat(3 << 20))).unwrap();
        assert_eq!(tail(&long).unwrap(), "last\n");
    }
}
