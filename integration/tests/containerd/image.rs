//! An image without a registry: one layer around static busybox, as an OCI archive.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use integration::run;
use serde_json::{Value, json};

/// The image's name, for containerd as for podman.
pub(crate) const NAME: &str = "inpod.test/pause:1";

/// Where Debian's package busybox-static puts it.
const BUSYBOX: &str = "/usr/bin/busybox";

/// The names of processors in OCI images are Go's.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

/// Writes the archive into a directory that is there, and gives its path (OCI image layout 1.0).
pub(crate) fn write(dir: &Path) -> anyhow::Result<PathBuf> {
    let (root, layout) = (dir.join("rootfs"), dir.join("layout"));
    fs::create_dir_all(root.join("bin"))?;
    fs::create_dir_all(layout.join("blobs/sha256"))?;
    fs::copy(BUSYBOX, root.join("bin/busybox")).context("install busybox-static")?;
    let layer = dir.join("layer.tar");
    pack(&root, &layer, &["bin"])?;
    let layer = blob(&layout, "application/vnd.oci.image.layer.v1.tar", &layer)?;
    let config = json!({
        "architecture": ARCHITECTURE, "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "sleep", "86400"]},
        "rootfs": {"type": "layers", "diff_ids": [layer.get("digest")]},
    });
    let config = document(&layout, "application/vnd.oci.image.config.v1+json", &config)?;
    let manifest = "application/vnd.oci.image.manifest.v1+json";
    let text =
        json!({"schemaVersion": 2, "mediaType": manifest, "config": config, "layers": [layer]});
    let mut entry = document(&layout, manifest, &text)?;
    // containerd reads the first, podman the second.
    let names =
        json!({"io.containerd.image.name": NAME, "org.opencontainers.image.ref.name": NAME});
    entry
        .as_object_mut()
        .context("a descriptor is an object")?
        .insert("annotations".to_owned(), names);
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(layout.join("index.json"), index.to_string())?;
    fs::write(
        layout.join("oci-layout"),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )?;
    let archive = dir.join("image.tar");
    pack(&layout, &archive, &["oci-layout", "index.json", "blobs"])?;
    Ok(archive)
}

fn pack(from: &Path, to: &Path, what: &[&str]) -> anyhow::Result<()> {
    let (from, to) = (from.display().to_string(), to.display().to_string());
    run("tar", &[&["-C", &from, "-cf", &to], what].concat()).map(drop)
}

/// Stores a file under its digest, and describes it.
fn blob(layout: &Path, media_type: &str, file: &Path) -> anyhow::Result<Value> {
    let printed = run("sha256sum", &[file])?;
    let digest = printed
        .split_whitespace()
        .next()
        .context("sha256sum prints a digest")?;
    let size = fs::copy(file, layout.join("blobs/sha256").join(digest))?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size}))
}

fn document(layout: &Path, media_type: &str, content: &Value) -> anyhow::Result<Value> {
    let file = layout.with_extension("json");
    fs::write(&file, content.to_string())?;
    blob(layout, media_type, &file)
}
