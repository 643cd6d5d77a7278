//! An image without a registry: one layer with static busybox, as OCI archive.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use integration::kubernetes::pack_image;
use serde_json::json;

/// The image's name, for containerd and podman.
pub(crate) const NAME: &str = "inpod.test/pause:1";

/// The path in Debian's package busybox-static.
const BUSYBOX: &str = "/usr/bin/busybox";

/// The answer of `httpd` at [`WHO`]: the client's address.
const ANSWER: &str = r#"#!/bin/busybox sh
printf 'Content-Type: text/plain\r\n\r\n%s\n' "$REMOTE_ADDR"
"#;

/// The path below `/www`.
pub(crate) const WHO: &str = "/cgi-bin/who";

/// Returns the path; the directory must exist.
pub(crate) fn write(dir: &Path) -> anyhow::Result<PathBuf> {
    let bin = dir.join("root/bin");
    fs::create_dir_all(&bin)?;
    fs::copy(BUSYBOX, bin.join("busybox")).context("install busybox-static")?;
    let who = dir.join("root/www").join(WHO.trim_start_matches('/'));
    fs::create_dir_all(who.parent().context("a file has a directory")?)?;
    fs::write(&who, ANSWER)?;
    fs::set_permissions(&who, fs::Permissions::from_mode(0o755))?;
    let archive = dir.join("image.tar");
    let runs = json!({"Cmd": ["/bin/busybox", "sleep", "86400"]});
    pack_image(dir, NAME, &runs, &archive)?;
    Ok(archive)
}
