//! How a process of inpod is configured, serves a Unix socket, checks its callers, reports and stops.
//!
//! A service's `main` is one call of [`main`] with its [`Service`] and its `run`. This crate knows nothing of pods.

mod cgroup;
mod check;
pub mod config;
mod deadline;
mod grpc;
pub mod help;
mod log;
pub mod metrics;
#[cfg(feature = "otlp")]
pub mod otlp;
#[cfg(not(feature = "otlp"))]
#[path = "without_otlp.rs"]
mod otlp;
pub mod peer;
mod readiness;
mod rlimit;
mod shutdown;
mod supervised_task;
mod trace;
pub mod uds;
pub mod uninstall;

pub use cgroup::cgroup_containers;
pub use config::{Key, list};
pub use deadline::deadline;
pub use grpc::{ConcurrencyGroup, Server};
pub use metrics::Metrics;
pub use otlp::{child_span, record_attribute};
pub use readiness::{Condition, Readiness};
pub use shutdown::Shutdown;
pub use supervised_task::abort_on_panic;
pub use trace::{TRACEPARENT, Trace};
pub use uninstall::UninstallMode;

use std::{
    ffi::OsString,
    fmt, fs,
    future::Future,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use tonic::transport::{Channel, Endpoint};

use crate::{
    config::{Command, Common, ConfigError},
    shutdown::StopHandle,
};

/// What a service is, for its command line, its sockets and its log.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// The one name: of the directory, crate, binary, container and socket.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// The service's version.
    pub version: &'static str,
    /// The service's own settings.
    pub keys: &'static [Key],
}

/// A running process of inpod, as its `run` sees it.
#[derive(Clone, Debug)]
pub struct Daemon {
    service: Service,
    instance_id: Arc<str>,
    run_dir: PathBuf,
    policy: Arc<peer::Policy>,
    shutdown: Shutdown,
    stop: StopHandle,
    readiness: Readiness,
    metrics: Metrics,
    max_calls: usize,
    /// Whether nothing that it keeps is of use after its end.
    removes_state: Arc<AtomicBool>,
    /// Nobody else is this service while this lives.
    _instance_lock: Arc<uds::SocketLock>,
}

impl Daemon {
    /// Names this run of the process; another one after every start.
    pub fn instance_id(&self) -> &str {
        &self.instance_id
    }

    /// Where all sockets but ZDS's, and all state, are kept.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// The 0700 directory of a component.
    pub fn directory(&self, component: &str) -> PathBuf {
        self.run_dir.join(component)
    }

    /// Who may call.
    pub fn policy(&self) -> &Arc<peer::Policy> {
        &self.policy
    }

    /// Tells when to stop.
    pub fn shutdown(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Stops the process as a first SIGTERM does: what it serves is drained.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Says whether this process's end is also that of all it keeps: then it empties its directory, its socket and lock
    /// with the rest, as the last thing it does. At first it does not, since a successor takes up what is there.
    pub fn remove_state_on_exit(&self, remove: bool) {
        self.removes_state.store(remove, Ordering::Relaxed);
    }

    /// Whether that was said last.
    pub fn removes_state_on_exit(&self) -> bool {
        self.removes_state.load(Ordering::Relaxed)
    }

    fn clean_up(&self) {
        if !self.removes_state_on_exit() {
            return;
        }
        let directory = self.directory(self.service.name);
        if let Err(error) = uds::clear_directory(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "Cannot remove what was kept");
        }
    }

    /// What is depended on, and whether the service is ready. Ready from the start where nothing is required.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// A client of another service's socket. Connects at the first call and again whenever it must; a call while
    /// nobody listens fails at once as UNAVAILABLE.
    pub fn channel(&self, component: &str) -> Channel {
        channel(&socket(&self.run_dir, component))
    }

    /// The server of this service's socket.
    pub fn server(&self) -> Server {
        Server::new(self)
    }
}

/// The gRPC socket of a component.
pub fn socket(run_dir: &Path, component: &str) -> PathBuf {
    run_dir.join(component).join("grpc.sock")
}

/// A client of a Unix socket, connected when it is first used.
pub fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    // The authority is never resolved; some servers insist on a well-formed one.
    Endpoint::from_static("http://localhost")
        .connect_timeout(Duration::from_secs(2))
        .connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
            let socket = socket.clone();
            async move {
                let stream = tokio::net::UnixStream::connect(socket).await?;
                io::Result::Ok(hyper_util::rt::TokioIo::new(stream))
            }
        }))
}

/// Runs a service: reads its configuration, then does what the command line asks for.
pub fn main<C, F, Fut>(service: &Service, run: F) -> ExitCode
where
    C: DeserializeOwned,
    F: FnOnce(C, Daemon) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    match start(service, run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(service, &error);
            exit_code(&error)
        }
    }
}

/// Returns the exit code for an error: 2 for a wrong command line, 1 for anything else.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref() {
        Some(ConfigError::Arguments(_)) => ExitCode::from(2),
        Some(_) | None => ExitCode::FAILURE,
    }
}

fn start<C, F, Fut>(service: &Service, run: F) -> anyhow::Result<()>
where
    C: DeserializeOwned,
    F: FnOnce(C, Daemon) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let loaded = match config::load(service, &arguments, std::env::vars_os())? {
        Command::PrintHelp(text) => return Ok(write!(io::stdout(), "{text}")?),
        Command::PrintConfig(text) => return Ok(write!(io::stdout(), "{text}")?),
        Command::Check(common, question) => {
            return runtime()?.block_on(check::check(service, &common, question));
        }
        Command::Run(loaded) => loaded,
    };
    let spans = otlp::Spans::new(loaded.read()?);
    let (common, settings) = loaded.parse::<C>()?;
    log::init(common.log_level, common.log_format, spans.layer())?;
    runtime()?.block_on(async {
        let daemon = prepare(*service, common)?;
        let exporter = spans.export(service, &daemon.instance_id, &daemon.metrics);
        tracing::info!(
            version = service.version,
            instance = &*daemon.instance_id,
            "Started"
        );
        // Held until the end, whatever becomes of the clone.
        let result = run(settings, daemon.clone()).await;
        exporter.flush().await;
        result?;
        daemon.clean_up();
        tracing::info!("Stopped");
        Ok(())
    })
}

/// The settings of a service for a command that is not the service itself, from the same sources. `None` when the command
/// line asked for help, the version or the settings, which are printed.
///
/// # Errors
///
/// When the settings cannot be used, or the command line asks for a probe, which only the service itself has.
pub fn load_settings<C: DeserializeOwned>(
    service: &Service,
    arguments: &[OsString],
) -> anyhow::Result<Option<C>> {
    match config::load(service, arguments, std::env::vars_os())? {
        Command::PrintHelp(text) | Command::PrintConfig(text) => {
            write!(io::stdout(), "{text}")?;
            Ok(None)
        }
        Command::Check(..) => {
            anyhow::bail!("--check and --check-live ask the service, not a command")
        }
        Command::Run(loaded) => {
            let (_, settings) = loaded.parse::<C>()?;
            Ok(Some(settings))
        }
    }
}

fn prepare(service: Service, common: Common) -> anyhow::Result<Daemon> {
    // Whatever is created, nobody else may read it.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    rlimit::raise_open_files();
    let directory = common.run_dir.join(service.name);
    uds::create_private_directory(&directory)?;
    let readiness = Readiness::default();
    let (stop, shutdown) = Shutdown::on_signals()?;
    Ok(Daemon {
        metrics: Metrics::new(&service, &readiness),
        readiness,
        max_calls: common.max_calls.get(),
        removes_state: Arc::default(),
        _instance_lock: Arc::new(uds::lock_instance(&directory)?),
        service,
        instance_id: instance_id()?.into(),
        policy: Arc::new(peer::Policy::new(&common.peer)?),
        shutdown,
        stop,
        run_dir: common.run_dir,
    })
}

fn instance_id() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let uuid = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(uuid.trim().to_owned())
}

/// Two workers: a slow read of one caller must not hold up the next, and a node has better uses for its cores.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// The last words of a process that ends with an error. The log may not be there yet, hence plain standard error.
fn print_error(service: &Service, error: &dyn fmt::Display) {
    let line = format!("{}: {error:#}\n", service.name);
    // Nobody is left to tell when this fails.
    io::stderr().write_all(line.as_bytes()).unwrap_or_default();
}
