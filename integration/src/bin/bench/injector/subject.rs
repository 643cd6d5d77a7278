//! The injector under test on a CPU of its own, and its callers.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use integration::{bin, eventually, run};
use serde_json::Value;
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

const TIMEOUT: Duration = Duration::from_secs(20);

const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 15017);

#[derive(Debug)]
pub(super) struct Subject {
    child: Child,
    trust: Arc<ClientConfig>,
    _dir: tempfile::TempDir,
}

impl Drop for Subject {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Subject {
    pub(super) fn start(cpu: usize) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir_in("/run")?;
        let script = "cd \"$0\"
            openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.crt -subj /CN=ca -days 2
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout tls.key -out csr -subj /CN=injector
            echo subjectAltName=IP:127.0.0.1 >names
            openssl x509 -req -in csr -CA ca.crt -CAkey ca.key -set_serial 1 -days 2 -out tls.crt -extfile names";
        let place = dir.path().to_str().context("a path in UTF-8")?;
        run("sh", &["-ec", script, place])?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(dir.path().join("ca.crt"))?)?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions()?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let child = Command::new("taskset")
            .args(["--cpu-list", &cpu.to_string()])
            .arg(bin("injector")?)
            .args(["--peer", "uid", "--run-dir"])
            .arg(dir.path().join("run"))
            .arg("--tls-dir")
            .arg(dir.path())
            .arg("--config-file")
            .arg(dir.path().join("none.yaml"))
            .args(["--listen-address", &ADDRESS.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log"))?)
            .spawn()
            .context("cannot run taskset; is util-linux installed?")?;
        let subject = Self {
            child,
            trust: Arc::new(config),
            _dir: dir,
        };
        eventually("the injector answers", TIMEOUT, || {
            subject.caller()?.nothing()
        })?;
        Ok(subject)
    }

    pub(super) fn caller(&self) -> anyhow::Result<Caller> {
        let stream = TcpStream::connect(ADDRESS)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let name = ServerName::IpAddress(ADDRESS.ip().into());
        let connection = ClientConnection::new(Arc::clone(&self.trust), name)?;
        let mut stream = StreamOwned::new(connection, stream);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(Caller(BufReader::new(stream)))
    }

    pub(super) fn resident(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.context("VmRSS")?.parse()?)
    }

    /// Returns the CPU time of the injector, with a resolution of 10 ms.
    pub(super) fn processor_time(&self) -> anyhow::Result<Duration> {
        // The child was started as taskset, which has executed the injector.
        used(self.child.id())
    }
}

#[derive(Debug)]
pub(super) struct Caller(BufReader<StreamOwned<ClientConnection, TcpStream>>);

impl Caller {
    pub(super) fn nothing(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let (status, _) = self.ask(b"GET /healthz HTTP/1.1\r\nHost: injector\r\n\r\n", &[])?;
        ensure!(status == 404, "{status}");
        Ok(began.elapsed())
    }

    /// Measures a review from the first byte of the request to the last byte of the answer.
    pub(super) fn review(&mut self, body: &[u8]) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let answer = self.post(body)?;
        let took = began.elapsed();
        ensure!(
            answer.windows(14).any(|it| it == b"\"allowed\":true"),
            "it was refused"
        );
        Ok(took)
    }

    pub(super) fn answer(&mut self, body: &[u8]) -> anyhow::Result<Value> {
        Ok(serde_json::from_slice(&self.post(body)?)?)
    }

    fn post(&mut self, body: &[u8]) -> anyhow::Result<Vec<u8>> {
        let head = format!(
            "POST /inject?timeout=10s HTTP/1.1\r\nHost: injector\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let (status, answer) = self.ask(head.as_bytes(), body)?;
        ensure!(
            status == 200,
            "{status}: {}",
            String::from_utf8_lossy(&answer)
        );
        Ok(answer)
    }

    fn ask(&mut self, head: &[u8], body: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
        let stream = self.0.get_mut();
        stream.write_all(&[head, body].concat())?;
        stream.flush()?;
        let mut status = String::new();
        self.0.read_line(&mut status)?;
        let status = status.split(' ').nth(1).context("a status")?.parse()?;
        let mut length = 0;
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            let line = line.to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut answer = vec![0; length];
        self.0.read_exact(&mut answer)?;
        Ok((status, answer))
    }
}

pub(super) fn patch(pod: &mut Value, patch: &str) -> anyhow::Result<()> {
    let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch)?)?;
    Ok(json_patch::patch(pod, &patch)?)
}

/// The unit of CPU time in `/proc` (proc(5), `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// Returns the sum of user and system CPU time, in steps of 10 ms.
fn used(pid: u32) -> anyhow::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The process name may contain spaces; the state and the fields 4 to 13 follow the name.
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks = ticks.map(str::parse::<u32>).sum::<Result<u32, _>>()?;
    Ok(TICK * ticks)
}
