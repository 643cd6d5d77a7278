//! The frame of every inpod process: settings, a gRPC server on a Unix socket, authorization,
//! metrics, health and shutdown.
//!
//! A service's `main` calls [`main`] with its [`Service`] and its `run`. This crate knows nothing of pods.

mod check;
pub mod config;
mod deadline;
mod endpoint;
mod files;
mod grpc;
mod log;
mod log_throttle;
pub mod metrics;
pub mod peer;
mod readiness;
mod rlimit;
mod shutdown;
mod supervised_task;
mod token_bucket;
mod trace;
pub mod uds;
pub mod uninstall;

pub use config::{Key, list};
pub use deadline::deadline;
pub use files::{
    is_unusable, read_bounded, read_bounded_any_fs, read_bounded_nofollow, read_bounded_text,
    remove_if_exists,
};
pub use grpc::{ConcurrencyGroup, Server};
pub use inpod_types::VERSION;
pub use log::escape_controls;
pub use log_throttle::throttle_log;
pub use metrics::Metrics;
pub use readiness::{Condition, Readiness};
pub use shutdown::Shutdown;
pub use supervised_task::abort_on_panic;
pub use token_bucket::TokenBucket;
pub use trace::{TRACEPARENT, Trace};
pub use uninstall::UninstallMode;

use std::{
    ffi::OsString,
    fs,
    future::Future,
    io::{self, Write as _},
    net::SocketAddr,
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
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};
use tonic::transport::{Channel, Endpoint};

use crate::config::{Command, Common, ConfigError};

/// The name, version and settings of a service.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// The name of the service's directory, crate, binary, container and socket.
    pub name: &'static str,
    /// A description of one line for `--help`.
    pub about: &'static str,
    pub version: &'static str,
    /// The service's own settings, in addition to the common settings.
    pub keys: &'static [Key],
}

/// A running service, passed to the service's `run`.
#[derive(Clone, Debug)]
pub struct Daemon {
    service: Service,
    instance_id: Arc<str>,
    run_dir: PathBuf,
    policy: Arc<peer::Policy>,
    shutdown: Shutdown,
    stop: watch::Sender<bool>,
    readiness: Readiness,
    metrics: Metrics,
    log_levels: Arc<log::Levels>,
    max_calls: usize,
    health_address: Option<SocketAddr>,
    /// True if the process empties its state directory at the end.
    removes_state: Arc<AtomicBool>,
    /// Keeps a second instance of the service from starting.
    _instance_lock: Arc<uds::SocketLock>,
}

impl Daemon {
    /// Returns an id that differs for each start of the process.
    pub fn instance_id(&self) -> &str {
        &self.instance_id
    }

    /// Returns the directory with all state, and with all sockets but the ZDS socket.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Returns the directory of a component, whose mode is 0700.
    pub fn directory(&self, component: &str) -> PathBuf {
        self.run_dir.join(component)
    }

    pub fn policy(&self) -> &Arc<peer::Policy> {
        &self.policy
    }

    pub fn shutdown(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Drains the server and stops the process, like the first SIGTERM.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Sets whether the process empties its directory, including socket and lock, at the end. By default the directory
    /// stays, because a successor continues with the same state.
    pub fn remove_state_on_exit(&self, remove: bool) {
        self.removes_state.store(remove, Ordering::Relaxed);
    }

    /// Returns the last value set by [`Self::remove_state_on_exit`].
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

    /// Returns the conditions; a service without required conditions is ready from the start.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns a channel to another service. The channel connects on the first call and reconnects as needed; while
    /// nothing listens, calls fail at once with UNAVAILABLE.
    pub fn channel(&self, component: &str) -> Channel {
        channel(&socket(&self.run_dir, component))
    }

    /// Asks another service of the node whether the service is ready.
    ///
    /// # Errors
    ///
    /// Fails if the service does not answer, or names its unmet conditions.
    pub async fn check_ready(&self, component: &str) -> anyhow::Result<()> {
        check::check(&self.run_dir, component, check::Question::Ready).await
    }

    pub fn server(&self) -> Server {
        Server::new(self)
    }
}

pub fn socket(run_dir: &Path, component: &str) -> PathBuf {
    run_dir.join(component).join("grpc.sock")
}

/// Returns a channel to a socket, which connects on the first call.
pub fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    // The host is never resolved, but some servers insist on a well-formed authority.
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

/// Reads the settings, then runs the service or the command on the command line. All tasks of the service share one
/// thread, so that tasks wake one another without waking a thread; blocking work runs on other threads.
pub fn main<C, F, Fut>(service: &Service, run: F) -> ExitCode
where
    C: DeserializeOwned,
    F: FnOnce(C, Daemon) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    finish(service, start(Builder::new_current_thread(), service, run))
}

/// Does the same as [`main`] on two threads, for a service whose calls compute for milliseconds and must not delay one
/// another.
pub fn main_on_two_threads<C, F, Fut>(service: &Service, run: F) -> ExitCode
where
    C: DeserializeOwned,
    F: FnOnce(C, Daemon) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    // Two threads suffice: a slow file read must not delay the next caller, and the cores are for the node's pods.
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2);
    finish(service, start(builder, service, run))
}

/// Prints an error to standard error, because the log may not exist yet.
fn finish(service: &Service, result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    let line = format!("{}: {error:#}\n", service.name);
    // A failure to print cannot be reported anywhere.
    io::stderr().write_all(line.as_bytes()).unwrap_or_default();
    exit_code(&error)
}

/// Closes `/proc/<pid>/{root,mem,fd,environ}` and ptrace of this process to other processes of its user without
/// CAP_SYS_PTRACE: all containers of the agent run as uid 0 and see each other's processes. The kernel then writes no core
/// dump either. `/proc/<pid>/{cgroup,status}`, by which peers are identified, stay readable.
///
/// # Errors
///
/// Fails if the kernel refuses the call, of which no case is known (prctl(2)).
pub fn deny_access_by_neighbors() -> io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(false)?)
}

/// Returns 2 for a wrong command line, and 1 for any other error.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref() {
        Some(ConfigError::Arguments(_)) => ExitCode::from(2),
        Some(_) | None => ExitCode::FAILURE,
    }
}

fn start<C, F, Fut>(builder: Builder, service: &Service, run: F) -> anyhow::Result<()>
where
    C: DeserializeOwned,
    F: FnOnce(C, Daemon) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    deny_access_by_neighbors()?;
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let loaded = match config::load(service, &arguments, std::env::vars_os())? {
        Command::PrintHelp(text) => return Ok(write!(io::stdout(), "{text}")?),
        Command::PrintConfig(text) => return Ok(write!(io::stdout(), "{text}")?),
        Command::Check(common, question) => {
            return runtime(builder)?.block_on(check::check(
                &common.run_dir,
                service.name,
                question,
            ));
        }
        Command::Run(loaded) => loaded,
    };
    let (common, settings) = loaded.parse::<C>()?;
    let levels = log::init(common.log_level, common.log_format)?;
    runtime(builder)?.block_on(async {
        let daemon = prepare(*service, common, levels)?;
        tracing::info!(
            version = service.version,
            instance = &*daemon.instance_id,
            "Started"
        );
        // This clone lives to the end, even if `run` drops the other one.
        run(settings, daemon.clone()).await?;
        daemon.clean_up();
        tracing::info!("Stopped");
        Ok(())
    })
}

/// Loads the settings for another command. Returns `None` if the command line asked for help, the version or the
/// settings, which this function then prints.
///
/// # Errors
///
/// Fails if the settings are unusable, or if the command line asks for a probe, which only the service can answer.
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

fn prepare(
    service: Service,
    common: Common,
    log_levels: Arc<log::Levels>,
) -> anyhow::Result<Daemon> {
    // Other users must not be able to read created files.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    rlimit::raise_open_files();
    let directory = common.run_dir.join(service.name);
    uds::create_private_directory(&directory)?;
    let readiness = Readiness::default();
    let (stop, shutdown) = Shutdown::on_signals()?;
    Ok(Daemon {
        metrics: Metrics::new(&service, &readiness),
        readiness,
        log_levels,
        max_calls: common.max_calls.get(),
        health_address: common.health_address,
        removes_state: Arc::default(),
        _instance_lock: Arc::new(uds::lock_instance(&directory)?),
        service,
        instance_id: instance_id()?.into(),
        policy: Arc::new(peer::Policy::new(&common.peer, common.host_cgroups)?),
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

fn runtime(mut builder: Builder) -> anyhow::Result<Runtime> {
    let built = builder.enable_all().build();
    built.context("cannot start the runtime")
}
