//! The images: built twice, imported, run, and a static binary's needs. Needs `IMAGE_BINARIES`, which
//! the tier `images` compiles.

use std::{
    ffi::OsStr,
    fs,
    net::{Ipv4Addr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{Node, TIMEOUT, eventually, run};
use serde_json::{Value, json};

use crate::runtime::containerd::{Runtime, end};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn binaries() -> PathBuf {
    let binaries = std::env::var_os("IMAGE_BINARIES");
    binaries
        .expect(
            "IMAGE_BINARIES names the directory of static binaries: run ./integration/test images",
        )
        .into()
}

/// Returns images and their binaries, as the build reads them.
fn components() -> Vec<Vec<String>> {
    let text = fs::read_to_string(Path::new(ROOT).join("deploy/images/components")).unwrap();
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default());
    let words = lines.map(|line| line.split_whitespace().map(str::to_owned).collect());
    words.filter(|words: &Vec<_>| !words.is_empty()).collect()
}

/// Returns each image's name and digest, as the build prints them.
fn built(out: &Path) -> Vec<(String, String)> {
    let (build, binaries) = (Path::new(ROOT).join("deploy/images/build"), binaries());
    let arguments = [
        "--out".as_ref(),
        out.as_os_str(),
        "--binaries".as_ref(),
        binaries.as_os_str(),
    ];
    let printed = run(build.to_str().unwrap(), &arguments).unwrap();
    let mut words = printed
        .lines()
        .map(|line| line.split(' ').map(str::to_owned));
    words
        .by_ref()
        .map(|mut line| (line.next().unwrap(), line.next().unwrap()))
        .collect()
}

/// Only images that work on the node run as root; a sidecar's checks run as its proxy.
fn user(image: &str) -> &'static str {
    match image {
        "validate" => "1337:1337",
        "injector" => "65532",
        _ => "0",
    }
}

/// The name in an image's configuration.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/run").unwrap()
}

/// Returns a document by its digest; without one, the index.
fn document(archive: &Path, digest: Option<&str>) -> Value {
    let blob = digest.map(|it| format!("blobs/{}", it.replace(':', "/")));
    let path = blob.unwrap_or_else(|| "index.json".to_owned());
    let text = run("tar", &["-xOf", archive.to_str().unwrap(), &path]).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn every_image_is_built_twice_with_the_same_digest_and_runs_as_containerd_has_imported_it() {
    let (first, second) = (scratch(), scratch());
    let images = built(first.path());
    assert_eq!(built(second.path()), images);
    assert_eq!(images.len(), components().len());
    let runtime = Runtime::on(Node::new().unwrap()).unwrap();
    for ((name, digest), component) in images.iter().zip(components()) {
        let [image, binary, ..] = &component[..] else {
            panic!("{component:?}")
        };
        let file = format!("{image}.tar");
        let archive = first.path().join(&file);
        assert!(
            fs::read(&archive).unwrap() == fs::read(second.path().join(&file)).unwrap(),
            "{file}"
        );
        let index = document(&archive, None);
        assert_eq!(index.pointer("/manifests/0/digest"), Some(&json!(digest)));
        let manifest = document(&archive, Some(digest));
        let config = manifest.pointer("/config/digest").and_then(Value::as_str);
        let config = document(&archive, config);
        assert_eq!(
            config.pointer("/config/Entrypoint"),
            Some(&json!([format!("/{binary}")]))
        );
        assert_eq!(config.pointer("/config/User"), Some(&json!(user(image))));
        assert_eq!(config.get("created"), Some(&json!("1970-01-01T00:00:00Z")));
        assert_eq!(config.get("architecture"), Some(&json!(ARCHITECTURE)));
        let title = config.pointer("/config/Labels/org.opencontainers.image.title");
        assert_eq!(title, Some(&json!(binary)));
        runtime
            .ctr(&[
                "images",
                "import",
                "--snapshotter",
                "native",
                archive.to_str().unwrap(),
            ])
            .unwrap();
        let said = runtime
            .contained(name, &[&format!("/{binary}"), "--version"])
            .unwrap();
        assert!(said.starts_with(&format!("{binary} ")), "{said}");
    }
}

#[test]
fn binaries_of_another_architecture_go_into_no_image() {
    let (build, out) = (Path::new(ROOT).join("deploy/images/build"), scratch());
    let other = if ARCHITECTURE == "amd64" {
        "arm64"
    } else {
        "amd64"
    };
    let [directory, archive] = [binaries(), out.path().join("validate.tar")];
    let arguments = [
        ["--arch".as_ref(), OsStr::new(other)],
        ["--out".as_ref(), out.path().as_os_str()],
        ["--binaries".as_ref(), directory.as_os_str()],
    ];
    let arguments = [arguments.as_flattened(), &["validate".as_ref()]].concat();
    let error = run(build.to_str().unwrap(), &arguments).unwrap_err();
    let expected = format!("validate is not for {other} but for ");
    assert!(error.to_string().contains(&expected), "{error}");
    assert!(!archive.exists());
}

#[test]
fn each_binary_is_static_and_runs_where_there_is_nothing_else() {
    for binary in components()
        .iter()
        .flatten()
        .skip(1)
        .filter(|it| binaries().join(it).is_file())
    {
        let path = binaries().join(binary);
        let reported = Command::new("ldd").arg(&path).output().unwrap();
        let reported = [reported.stdout, reported.stderr].concat();
        let reported = String::from_utf8_lossy(&reported).into_owned();
        assert!(
            ["not a dynamic executable", "statically linked"]
                .iter()
                .any(|it| reported.contains(it)),
            "{binary}: {reported}"
        );
        let root = scratch();
        let root = root.path().to_str().unwrap();
        // By a separate process: one that another thread starts meanwhile would hold the copy open for writing.
        run("install", &["-m", "755", path.to_str().unwrap(), root]).unwrap();
        if binary == "inpod-cni" {
            let script = format!("CNI_COMMAND=VERSION chroot {root} /{binary}");
            let said = Command::new("sh")
                .args([
                    "-c",
                    &format!("echo '{{\"cniVersion\":\"1.0.0\"}}' | {script}"),
                ])
                .output()
                .unwrap();
            assert!(
                String::from_utf8_lossy(&said.stdout).contains("1.1.0"),
                "{said:?}"
            );
        } else {
            let said = run("chroot", &[root, &format!("/{binary}"), "--version"]).unwrap();
            assert!(said.starts_with(&format!("{binary} ")), "{said}");
        }
    }
}

/// The API server's name, address and port.
const API: (&str, Ipv4Addr, &str) = ("api.inpod.test", Ipv4Addr::new(10, 77, 0, 1), "6443");

/// Knows one name (RFC 1035, 4.1). Returns how often it was asked.
fn name_server(netns: &Netns) -> Arc<AtomicUsize> {
    let socket = netns
        .within(|| UdpSocket::bind((API.1, 53)))
        .unwrap()
        .unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            let question = buffer.get(..length).unwrap();
            // After the header and the name: QTYPE A.
            let end = 12
                + question
                    .iter()
                    .skip(12)
                    .position(|byte| *byte == 0)
                    .unwrap();
            let is_a = question.get(end + 1..end + 3) == Some(&[0, 1]);
            let mut answer = question.get(..end + 5).unwrap().to_vec();
            let header = [0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0];
            answer.splice(2..12, header);
            if is_a {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
                answer.extend(API.1.octets());
            }
            count.fetch_add(1, Ordering::Relaxed);
            drop(socket.send_to(&answer, peer));
        }
    });
    asked
}

/// Creates two authorities, and a server certificate of the first.
fn certificates(directory: &Path) {
    let script = format!(
        "cd \"$0\" && new='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
         for ca in ca other; do openssl req -x509 $new -keyout $ca.key -out $ca.crt -subj /CN=$ca -days 2; done
         openssl req $new -keyout api.key -out api.csr -subj /CN=api
         echo subjectAltName=DNS:{} >names
         openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out api.crt -extfile names",
        API.0
    );
    run("sh", &["-ec", &script, directory.to_str().unwrap()]).unwrap();
}

/// Creates a root directory like pod-events' container: an empty image and the kubelet's mounts.
fn root(directory: &Path, authority: &str) -> PathBuf {
    let root = directory.join(format!("root-{authority}"));
    let account = root.join("var/run/secrets/kubernetes.io/serviceaccount");
    for part in ["etc", "proc", "run/inpod", "var/lib/inpod/plugin"] {
        fs::create_dir_all(root.join(part)).unwrap();
    }
    fs::create_dir_all(&account).unwrap();
    fs::copy(binaries().join("pod-events"), root.join("pod-events")).unwrap();
    fs::copy(
        directory.join(authority).with_extension("crt"),
        account.join("ca.crt"),
    )
    .unwrap();
    fs::write(account.join("token"), "a-token").unwrap();
    fs::write(account.join("namespace"), "inpod").unwrap();
    fs::write(
        root.join("etc/resolv.conf"),
        format!("nameserver {}\n", API.1),
    )
    .unwrap();
    root
}

fn within(node: &Node, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", node.netns().path().display()))
        .arg(program);
    command
}

/// Starts pod-events in its root.
fn pod_events(node: &Node, root: &Path) -> (Child, PathBuf) {
    let log = root.with_extension("log");
    let script = "mount --bind /proc \"$0/proc\" && exec chroot \"$0\" /pod-events --node-name node-1 --pods-from kubernetes \
                  --peer uid --log-format text --log-level debug";
    let mut command = within(node, "unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(root);
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
        .env("KUBERNETES_SERVICE_HOST", API.0)
        .env("KUBERNETES_SERVICE_PORT", API.2);
    let file = fs::File::create(&log).unwrap();
    command
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file);
    (command.spawn().unwrap(), log)
}

#[test]
fn a_static_pod_events_finds_the_api_server_by_name_and_trusts_the_service_accounts_authority_alone()
 {
    let (node, directory) = (Node::new().unwrap(), scratch());
    let directory = directory.path();
    certificates(directory);
    let asked = name_server(node.netns());
    let [heard, alerts] = ["heard", "alerts"].map(|name| directory.join(name));
    let mut server = within(&node, "openssl");
    let address = format!("{}:{}", API.1, API.2);
    server.args([
        "s_server", "-quiet", "-accept", &address, "-cert", "api.crt", "-key", "api.key",
    ]);
    server.current_dir(directory).stdin(Stdio::piped());
    server
        .stdout(fs::File::create(&heard).unwrap())
        .stderr(fs::File::create(&alerts).unwrap());
    let mut server = server.spawn().unwrap();
    let reported = |log: &Path, what: &str| {
        let texts = [&heard, &alerts].map(|path| fs::read(path).unwrap());
        let said = String::from_utf8_lossy(&texts.concat()).to_lowercase();
        ensure!(
            said.contains(what),
            "{what:?} is not in {said:?}: {}",
            fs::read_to_string(log)?
        );
        anyhow::Ok(())
    };
    // Another authority fails the handshake.
    let (mut stranger, log) = pod_events(&node, &root(directory, "other"));
    let refused = eventually("the server is not trusted", TIMEOUT, || {
        reported(&log, "alert unknown ca")
    });
    end(&mut stranger);
    let said = fs::read(&heard).unwrap();
    let (mut friend, log) = pod_events(&node, &root(directory, "ca"));
    let asks = [
        "get /api/v1/",
        "host: api.inpod.test:6443",
        "authorization: bearer a-token",
    ];
    let served = eventually("it asks with its token", TIMEOUT, || {
        asks.iter().try_for_each(|it| reported(&log, it))
    });
    end(&mut friend);
    end(&mut server);
    refused.context("with another authority").unwrap();
    assert_eq!(String::from_utf8_lossy(&said), "");
    served.unwrap();
    assert!(asked.load(Ordering::Relaxed) > 0);
}
