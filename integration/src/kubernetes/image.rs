//! Builds images without a registry: archives in the OCI image layout 1.0, with one layer each.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::{bin, istio_cni_programs, run, tool};

/// The processor architecture; OCI uses the names of Go.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

/// The path of busybox in Debian's package busybox-static.
const BUSYBOX: &str = "/usr/bin/busybox";

/// The extensions of iptables.
const MATCHES: &str = if cfg!(target_arch = "aarch64") {
    "/usr/lib/aarch64-linux-gnu/xtables"
} else {
    "/usr/lib/x86_64-linux-gnu/xtables"
};

/// The binaries of each image, in the file that `deploy/images/build` reads.
const COMPONENTS: &str = include_str!("../../../deploy/images/components");

/// The default tag in the chart, which is the chart's `appVersion`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
pub const PREVIOUS_VERSION: &str = "0.1.0";

/// The commands for pods in these tests.
const APPLETS: [&str; 9] = [
    "sh", "sleep", "httpd", "wget", "nc", "cat", "echo", "mkdir", "true",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// `inpod.test/busybox:1`, for sandboxes and applications.
    Busybox,
    Ztunnel,
    /// `inpod.test/sidecar:1`, a proxy that prints each connection (`src/bin/sidecar/`). Like Istio's proxy, the
    /// program is started by arguments only.
    Sidecar,
    /// `inpod.test/NAME:1`: a program without libraries that a variable of the test script names, run as Istio's user.
    Tool {
        name: &'static str,
        variable: &'static str,
    },
    /// The stock ztunnel with its libraries.
    StockZtunnel,
    /// `inpod.test/proxyv2:1`, Istio's agent of a proxy with an Envoy that has none of Istio's own filters.
    Proxy,
    /// `inpod.test/install-cni:1`, istio-cni with the programs of iptables and nft that it runs.
    IstioCni,
    /// `inpod.test/kube-router:1`, an engine of network policies with the programs of iptables and ipset that it runs.
    KubeRouter,
    /// `inpod.test/app:1`, the echo programs of Istio's tests with a certificate.
    Echo,
    /// An image of inpod, named `localhost/NAME:TAG` as by `deploy/images/build`, with the layout of the Containerfile.
    /// The image holds the last binaries of this workspace and their libraries. The name is one in
    /// `deploy/images/components`.
    Shipped(&'static str),
    /// The same of the previous release, with the binaries that `need_previous` in `integration/setup.sh` builds.
    Previous(&'static str),
}

impl Image {
    fn name(&self) -> &'static str {
        match self {
            Self::Busybox => "busybox",
            Self::Ztunnel => "reference-ztunnel",
            Self::Sidecar => "sidecar",
            Self::StockZtunnel => "ztunnel",
            Self::Echo => "app",
            Self::Proxy => "proxyv2",
            Self::IstioCni => "install-cni",
            Self::KubeRouter => "kube-router",
            Self::Tool { name, .. } => name,
            Self::Shipped(name) | Self::Previous(name) => name,
        }
    }

    pub fn reference(&self) -> String {
        match self {
            Self::Busybox
            | Self::Ztunnel
            | Self::Sidecar
            | Self::StockZtunnel
            | Self::Echo
            | Self::Proxy
            | Self::IstioCni
            | Self::KubeRouter
            | Self::Tool { .. } => {
                format!("inpod.test/{}:1", self.name())
            }
            Self::Shipped(name) => format!("localhost/{name}:{VERSION}"),
            Self::Previous(name) => format!("localhost/{name}:{PREVIOUS_VERSION}"),
        }
    }

    /// Writes the archive `NAME.tar`, and returns its path.
    pub fn write(&self, dir: &Path) -> anyhow::Result<PathBuf> {
        let work = dir.join(self.name());
        let root = work.join("root");
        let entrypoint = match self {
            Self::Busybox => busybox(&root)?,
            Self::Ztunnel => {
                component(&root, &[self.name()], bin)?;
                // The chart's default captures DNS.
                json!(["/reference-ztunnel", "--dns"])
            }
            Self::Sidecar => {
                component(&root, &[self.name()], bin)?;
                json!(["/sidecar", "original"])
            }
            Self::StockZtunnel => component(&root, &["ztunnel"], |_| tool("ZTUNNEL"))?,
            Self::Echo => echo(&root)?,
            Self::Proxy => proxy(&root)?,
            Self::IstioCni => istio_cni(&root)?,
            Self::KubeRouter => kube_router(&root)?,
            Self::Tool { name, variable } => {
                fs::create_dir_all(&root)?;
                fs::copy(tool(variable)?, root.join(name))?;
                json!([format!("/{name}")])
            }
            Self::Shipped(name) => component(&root, &binaries(name)?, bin)?,
            Self::Previous(name) => {
                // The client had an image of its own.
                let all = binaries(name)?.into_iter();
                let names: Vec<_> = all.filter(|name| *name != "inpod").collect();
                component(&root, &names, previous)?
            }
        };
        let archive = dir.join(format!("{}.tar", self.name()));
        let mut runs = json!({"Entrypoint": entrypoint});
        if let (Self::Tool { .. } | Self::Echo | Self::Proxy, Some(runs)) =
            (self, runs.as_object_mut())
        {
            runs.insert("User".to_owned(), json!("1337"));
        }
        pack_image(&work, &self.reference(), &runs, &archive)?;
        fs::remove_dir_all(work)?;
        Ok(archive)
    }
}

/// Returns a file of the previous release: a program, or `chart`.
pub fn previous(name: &str) -> anyhow::Result<PathBuf> {
    let directory = std::env::var_os("PREVIOUS").context(
        "PREVIOUS names no directory: run ./integration/test --full, which builds the previous release",
    )?;
    let path = PathBuf::from(directory).join(name);
    anyhow::ensure!(path.exists(), "{} is missing", path.display());
    Ok(path)
}

fn busybox(root: &Path) -> anyhow::Result<Value> {
    let bin = root.join("bin");
    fs::create_dir_all(&bin)?;
    fs::create_dir_all(root.join("tmp"))?;
    fs::copy(BUSYBOX, bin.join("busybox")).context("install busybox-static")?;
    APPLETS
        .iter()
        .try_for_each(|applet| symlink("busybox", bin.join(applet)))?;
    Ok(json!(["/bin/sleep", "86400"]))
}

/// Writes what the image of Istio's tests has (pkg/test/echo/docker in Istio's module); the tests do not verify the certificate.
fn echo(root: &Path) -> anyhow::Result<Value> {
    let programs = std::env::var_os("ISTIO_TESTS").context("ISTIO_TESTS names no directory")?;
    let bin = root.join("usr/local/bin");
    fs::create_dir_all(&bin)?;
    for program in ["server", "client"] {
        fs::copy(Path::new(&programs).join(program), bin.join(program))?;
    }
    let [key, certificate] = ["cert.key", "cert.crt"].map(|name| root.join(name));
    let [keyout, out] = [&key, &certificate].map(|path| path.display().to_string());
    let request = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "30",
        "-subj",
        "/CN=server.default.svc.cluster.local",
        "-addext",
        "subjectAltName=DNS:server.default.svc",
    ];
    run(
        "openssl",
        &[&request[..], &["-keyout", &keyout, "-out", &out]].concat(),
    )?;
    fs::set_permissions(key, Permissions::from_mode(0o444))?;
    Ok(json!(["/usr/local/bin/server"]))
}

/// Writes what the Dockerfile of Istio's image has (pilot/docker/Dockerfile.proxyv2 in Istio's module).
fn proxy(root: &Path) -> anyhow::Result<Value> {
    let module = std::env::var_os("ISTIO_MODULE").context("ISTIO_MODULE names no directory")?;
    let module = PathBuf::from(module);
    let bootstrap = root.join("var/lib/istio/envoy/envoy_bootstrap_tmpl.json");
    let bin = root.join("usr/local/bin");
    for (from, to) in [
        (
            module.join("tools/packaging/common/envoy_bootstrap.json"),
            bootstrap,
        ),
        (tool("PILOT_AGENT")?, bin.join("pilot-agent")),
        (tool("ENVOY")?, bin.join("envoy")),
    ] {
        fs::create_dir_all(to.parent().context("a file has a directory")?)?;
        fs::copy(from, to)?;
    }
    copy_libraries(root, &bin.join("envoy"))?;
    Ok(json!(["/usr/local/bin/pilot-agent"]))
}

/// Returns the binaries of an image; the first binary is the entrypoint.
fn binaries(image: &str) -> anyhow::Result<Vec<&'static str>> {
    let mut lines = COMPONENTS.lines().map(str::split_whitespace);
    let words = lines.find_map(|mut words| (words.next() == Some(image)).then_some(words));
    let words = words.with_context(|| format!("deploy/images/components has no {image}"))?;
    Ok(words.collect())
}

/// Copies the binaries and their libraries to the root of the image, like the Containerfile.
fn component(
    root: &Path,
    names: &[&str],
    find: impl Fn(&str) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<Value> {
    fs::create_dir_all(root)?;
    for name in names {
        let (from, to) = (find(name)?, root.join(name));
        let [source, target] = [&from, &to].map(|path| path.display().to_string());
        run("strip", &["-o", &target, &source])?;
        let mode = if *name == "inpod-cni" { 0o555 } else { 0o111 };
        fs::set_permissions(&to, Permissions::from_mode(mode))?;
        copy_libraries(root, &from)?;
    }
    let runs = names.first().context("an image runs something")?;
    Ok(json!([format!("/{runs}")]))
}

fn copy_libraries(root: &Path, program: &Path) -> anyhow::Result<()> {
    libraries(program)?
        .iter()
        .try_for_each(|library| copy_to(root, library))
}

/// Copies a file of this machine to the same place in the image.
fn copy_to(root: &Path, path: &Path) -> anyhow::Result<()> {
    let target = root.join(path.strip_prefix("/").context("a full path")?);
    fs::create_dir_all(target.parent().context("a file has a directory")?)?;
    fs::copy(path, target)?;
    Ok(())
}

/// The programs are where the Dockerfile of Istio's image puts them.
fn istio_cni(root: &Path) -> anyhow::Result<Value> {
    let programs = istio_cni_programs()?;
    for (program, to) in [
        ("install-cni", "usr/local/bin"),
        ("istio-cni", "opt/cni/bin"),
    ] {
        fs::create_dir_all(root.join(to))?;
        fs::copy(programs.join(program), root.join(to).join(program))?;
    }
    copy_system_programs(root, &["nft"])?;
    copy_iptables(root)?;
    Ok(json!(["/usr/local/bin/install-cni"]))
}

fn kube_router(root: &Path) -> anyhow::Result<Value> {
    fs::create_dir_all(root)?;
    fs::copy(tool("KUBE_ROUTER")?, root.join("kube-router"))?;
    copy_system_programs(root, &["ipset"])?;
    copy_iptables(root)?;
    Ok(json!(["/kube-router"]))
}

/// Copies programs of this machine with their libraries.
fn copy_system_programs(root: &Path, names: &[&str]) -> anyhow::Result<()> {
    names.iter().try_for_each(|name| {
        let path = Path::new("/usr/sbin").join(name);
        copy_to(root, &path).with_context(|| format!("install {name}"))?;
        copy_libraries(root, &path)
    })
}

/// Copies the programs of iptables, which are names of two programs. Debian's iptables loads its matches from a directory.
fn copy_iptables(root: &Path) -> anyhow::Result<()> {
    copy_system_programs(root, &["xtables-nft-multi", "xtables-legacy-multi"])?;
    for family in ["iptables", "ip6tables"] {
        for part in ["", "-save", "-restore"] {
            for (kind, target) in [("-nft", "nft"), ("-legacy", "legacy"), ("", "nft")] {
                let name = root.join(format!("usr/sbin/{family}{kind}{part}"));
                symlink(format!("xtables-{target}-multi"), name)?;
            }
        }
    }
    let matches = Path::new(MATCHES);
    for entry in fs::read_dir(matches).context("install iptables")? {
        copy_to(root, &entry?.path())?;
    }
    Ok(())
}

/// Returns the libraries and the loader of a program (ldd(1): `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)`).
fn libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let printed = run("ldd", &[program])?;
    let paths = printed
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}

/// Packs `root` as an image with the entrypoint of a container.
pub fn pack_image(work: &Path, name: &str, runs: &Value, archive: &Path) -> anyhow::Result<()> {
    let layout = work.join("layout");
    fs::create_dir_all(layout.join("blobs/sha256"))?;
    let layer = work.join("layer.tar");
    pack(&work.join("root"), &layer, &["."])?;
    let layer = blob(&layout, "application/vnd.oci.image.layer.v1.tar", &layer)?;
    let config = json!({
        "architecture": ARCHITECTURE, "os": "linux",
        "config": runs,
        "rootfs": {"type": "layers", "diff_ids": [layer.get("digest")]},
    });
    let config = document(&layout, "application/vnd.oci.image.config.v1+json", &config)?;
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer]});
    let mut entry = document(&layout, kind, &manifest)?;
    // containerd reads the first annotation, podman the second.
    let names =
        json!({"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name});
    let described = entry.as_object_mut().context("a descriptor is an object")?;
    described.insert("annotations".to_owned(), names);
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(layout.join("index.json"), index.to_string())?;
    let version = r#"{"imageLayoutVersion":"1.0.0"}"#;
    fs::write(layout.join("oci-layout"), version)?;
    pack(&layout, archive, &["oci-layout", "index.json", "blobs"])
}

fn pack(from: &Path, to: &Path, what: &[&str]) -> anyhow::Result<()> {
    let (from, to) = (from.display().to_string(), to.display().to_string());
    run("tar", &[&["-C", &from, "-cf", &to], what].concat()).map(drop)
}

/// Stores the file as a blob under its digest, and returns the descriptor.
fn blob(layout: &Path, media_type: &str, file: &Path) -> anyhow::Result<Value> {
    let printed = run("sha256sum", &[file])?;
    let digest = printed.split_whitespace().next();
    let digest = digest.context("sha256sum prints a digest")?;
    let size = fs::copy(file, layout.join("blobs/sha256").join(digest))?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size}))
}

fn document(layout: &Path, media_type: &str, content: &Value) -> anyhow::Result<Value> {
    let file = layout.with_extension("json");
    fs::write(&file, content.to_string())?;
    blob(layout, media_type, &file)
}
