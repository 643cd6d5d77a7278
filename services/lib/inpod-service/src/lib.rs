//! The frame of every inpod process: settings, a gRPC server on a Unix socket, authorization of callers,
//! metrics, health and shutdown.
//!
//! A service's `main` is one call of [`main`] with its [`Service`] and its `run`. This crate knows nothing of pods.

mod cgroup;
mod check;
pub mod config;
mod deadline;
mod grpc;
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

/// The identity of a service.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// The one name of the directory, crate, binary, container and socket.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    pub version: &'static str,
    /// The service's own settings.
    pub keys: &'static [Key],
}

/// A running service, as passed to its `run`.
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
    /// True if the state directory is emptied when the process ends.
    removes_state: Arc<AtomicBool>,
    /// Held for the life of the process, so that a second instance cannot start.
    _instance_lock: Arc<uds::SocketLock>,
}

impl Daemon {
    /// Identifies this run of the process; every start has another one.
    pub fn instance_id(&self) -> &str {
        &self.instance_id
    }

    /// Returns the directory of all state and of all sockets but the ZDS socket.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Returns the 0700 directory of a component.
    pub fn directory(&self, component: &str) -> PathBuf {
        self.run_dir.join(component)
    }

    /// Returns the policy that identifies and authorizes callers.
    pub fn policy(&self) -> &Arc<peer::Policy> {
        &self.policy
    }

    /// Returns the shutdown signal.
    pub fn shutdown(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Drains and stops the process, as the first SIGTERM does.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Sets whether the process empties its directory, including socket and lock, as the last thing it does. By default
    /// it does not, since its successor continues with that state.
    pub fn remove_state_on_exit(&self, remove: bool) {
        self.removes_state.store(remove, Ordering::Relaxed);
    }

    /// Returns what [`Self::remove_state_on_exit`] set last.
    pub fn removes_state_on_exit(&self) -> bool {
        self.removes_state.load(Ordering::Relaxed)
    }

    fn clean_up(&self) {
        if !self.removes_state_on_exit() {
            return;
        }
        let directory = self.directory(self.service.name);
        if let Err(error) = uds::clear_directory(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "Cannot remove the state directory's content");
        }
    }

    /// Returns the conditions. A service without required conditions is ready from the start.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns a client channel to another service's socket. It connects on the first call and reconnects as needed; a
    /// call while nothing listens fails at once with UNAVAILABLE.
    pub fn channel(&self, component: &str) -> Channel {
        channel(&socket(&self.run_dir, component))
    }

    /// Returns the server of this service's socket.
    pub fn server(&self) -> Server {
        Server::new(self)
    }
}

/// Returns the path of a component's gRPC socket.
pub fn socket(run_dir: &Path, component: &str) -> PathBuf {
    run_dir.join(component).join("grpc.sock")
}

/// Returns a channel to a Unix socket that connects on first use.
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

/// Runs a service: reads its settings, then does what the command line asks for.
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
    let spans = otlp::ExporterBuilder::new(loaded.read()?);
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
        // A clone stays here until the end, whatever `run` does with the other.
        let result = run(settings, daemon.clone()).await;
        exporter.flush().await;
        result?;
        daemon.clean_up();
        tracing::info!("Stopped");
        Ok(())
    })
}

/// Loads a service's settings for a command that is not the service itself. Returns `None` if the command line asked
/// for help, the version or the settings, which are then printed.
///
/// # Errors
///
/// Fails if the settings are unusable, or if the command line asks for a probe, which only the service has.
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
            anyhow::bail!("--check and --check-live need the service, not a command")
        }
        Command::Run(loaded) => {
            let (_, settings) = loaded.parse::<C>()?;
            Ok(Some(settings))
        }
    }
}

fn prepare(service: Service, common: Common) -> anyhow::Result<Daemon> {
    // Created files must not be readable by other users.
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

/// Uses two worker threads: a slow file read for one caller must not delay the next, and the node's cores
/// are for its pods.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Prints the error that ends the process to standard error: the log may not be initialized yet.
fn print_error(service: &Service, error: &dyn fmt::Display) {
    let line = format!("{}: {error:#}\n", service.name);
    // There is no way left to report a failure.
    io::stderr().write_all(line.as_bytes()).unwrap_or_default();
}
