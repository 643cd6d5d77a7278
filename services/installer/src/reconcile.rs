//! Brings the plugin and the chain into the desired state.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_service::uds;
use nix::fcntl::Flock;

use inpod_types::with_causes;

use crate::{
    Conflist, Directory, INPOD_CNI, NetworkFile, ReadError, Runtime,
    backoff::Backoff,
    binary::{self, FileStamps, Installed},
    config::Config,
    directory::{below, resolve},
    error::{BinaryError, ChainError},
    files, known_conflicts,
    metrics::Metrics,
    plan::{DesiredChain, Plan},
    record::Record,
    removal::{self, Restore},
    steps::{self, Cause, Step},
    volatile::volatile_file_system,
};

/// The time within which events lead to a single reconcile.
pub(crate) const COALESCE_DELAY: Duration = Duration::from_millis(5);

const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Changes the CNI directories, and remembers the changes that were made.
#[derive(Debug)]
pub struct Installer {
    pub(crate) config: Config,
    pub(crate) desired: DesiredChain,
    pub(crate) record: Record,
    pub(crate) dirs: Dirs,
    /// The directory with the plugin: the first of `dirs.bins` that has the plugin or can be written.
    pub(crate) bin: PathBuf,
    metrics: Metrics,
    backoff: Backoff,
    /// The problem that was logged last, so that a problem is logged once instead of at every reconcile.
    last_problem: String,
    /// The stamps with which the installed plugin was found current.
    verified: Option<FileStamps>,
    /// The stamps of the plugin that was asked for its versions.
    asked: Option<FileStamps>,
    /// The lock that excludes other installers on this node.
    _lock: Flock<fs::File>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    pub conf: PathBuf,
    /// The directories in which the runtime searches plugins, in order.
    pub bins: Vec<PathBuf>,
}

#[derive(Debug)]
pub struct Outcome {
    pub(crate) binary: Result<(), String>,
    pub(crate) chain: Result<(), String>,
    /// Whether pods wait for inpod after a reboot.
    pub(crate) reboot: Result<(), String>,
    /// Whether pods of every runtime handler are in the mesh.
    pub(crate) handlers: Result<(), String>,
    /// The delay of the next reconcile, unless an event comes first.
    pub(crate) retry_after: Option<Duration>,
}

impl Installer {
    /// Creates the installer and takes over the record of an earlier one.
    ///
    /// # Errors
    ///
    /// Fails if another installer runs, or if the record is unusable.
    pub fn new(config: Config, metrics: Metrics) -> anyhow::Result<Self> {
        let dir = config.record_dir();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.with_context(|| {
            format!(
                "cannot create {}; check that it is mounted and writable",
                dir.display()
            )
        })?;
        let lock = lock(&dir)?;
        files::remove_temporaries(&dir)
            .with_context(|| format!("cannot clean up {}", dir.display()))?;
        let (dirs, runtime) = find_dirs(&config);
        let mut desired = DesiredChain::new(&config);
        desired.runtime = runtime;
        Ok(Self {
            _lock: lock,
            record: Record::read(&dir)?,
            bin: dirs.bins.first().cloned().unwrap_or_default(),
            desired,
            dirs,
            asked: None,
            backoff: Backoff::default(),
            verified: None,
            last_problem: String::new(),
            metrics,
            config,
        })
    }

    pub(crate) fn reconcile(&mut self, now: Instant) -> Outcome {
        (self.dirs, self.desired.runtime) = find_dirs(&self.config);
        let binary = self.reconcile_binary().map_err(|error| with_causes(&error));
        // The chain waits for the plugin, because an entry without a plugin fails every pod. If the entry exists
        // already, there is nothing to wait for.
        let chain = if binary.is_ok() || !self.record.files.is_empty() {
            self.reconcile_chain(now)
        } else {
            Ok(Err("waiting for the plugin binary".to_owned()))
        };
        let (chain, retry_after) = match chain {
            Ok(Ok(())) => (Ok(()), None),
            Ok(Err(why)) => (
                Err(why),
                Some(self.backoff.delay(now)).filter(|wait| !wait.is_zero()),
            ),
            Err(ChainError::Raced(_)) => (
                Err("a file was changed at the same time".to_owned()),
                Some(COALESCE_DELAY),
            ),
            Err(error) => (Err(with_causes(&error)), Some(RETRY_INTERVAL)),
        };
        let binary_retry = binary.is_err().then_some(RETRY_INTERVAL);
        self.log_problem(&binary, &chain);
        Outcome {
            binary,
            chain,
            reboot: self.check_reboot(),
            handlers: self.check_handlers(),
            retry_after: retry_after.or(binary_retry),
        }
    }

    fn log_problem(&mut self, binary: &Result<(), String>, chain: &Result<(), String>) {
        let why = binary.as_ref().err().or_else(|| chain.as_ref().err());
        let why = why.map_or("", String::as_str);
        // A problem of which only the delay has changed is not logged again.
        let stable_part = |text: &str| {
            text.split(", next in ")
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        if !why.is_empty() && stable_part(&self.last_problem) != stable_part(why) {
            tracing::warn!(why, "inpod is not installed completely");
        }
        self.last_problem = why.to_owned();
    }

    fn check_reboot(&self) -> Result<(), String> {
        let dir = &self.dirs.conf;
        match volatile_file_system(&self.config.host_root, dir) {
            None => Ok(()),
            Some(file_system) => Err(format!(
                "{} does not survive a reboot ({file_system}): pods then start outside the mesh until inpod runs, so this node needs the start-up taint",
                dir.display()
            )),
        }
    }

    /// Checks the handlers of containerd that have a CNI directory of their own, which the installer does not change.
    fn check_handlers(&self) -> Result<(), String> {
        let root = &self.config.host_root;
        let others = self.desired.runtime.handlers.iter();
        let without_us = others.filter(|(_, dir)| {
            let directory = Directory::read(root, dir).unwrap_or_default();
            let first = directory.files.first().and_then(NetworkFile::list);
            **dir != self.dirs.conf && first.is_none_or(|list| list.calls().is_empty())
        });
        let named: Vec<_> = without_us
            .map(|(name, dir)| format!("{name} ({})", dir.display()))
            .collect();
        if named.is_empty() {
            return Ok(());
        }
        Err(format!(
            "pods start without inpod with the runtime handler {}: remove its cni_conf_dir, or add inpod's entry to the first file there",
            named.join(", ")
        ))
    }

    /// Installs the plugin in the first directory of the runtime's search that allows it.
    fn reconcile_binary(&mut self) -> Result<(), BinaryError> {
        let mut first_error = None;
        for dir in self.dirs.bins.clone() {
            self.bin = dir;
            match self.install() {
                // The runtime would find an outdated plugin there before one in a later directory.
                Err(error @ (BinaryError::NoDirectory(_) | BinaryError::ReadOnly(_)))
                    if !self.at(&self.bin).join(INPOD_CNI).exists() =>
                {
                    first_error = first_error.or(Some(error));
                }
                result => return result,
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Asks the installed plugin for its versions, if the file has changed.
    fn ask_versions(&mut self) -> Result<(), String> {
        let dir = self.at(&self.bin);
        let stamps = FileStamps::of(&self.config.plugin_source, &dir);
        if stamps.is_none() || stamps != self.asked {
            let versions = binary::ask_versions(&dir.join(INPOD_CNI));
            self.desired.spoken = versions.map_err(|problem| {
                format!(
                    "the plugin in {} does not work: {problem}",
                    self.bin.display()
                )
            })?;
            self.asked = stamps;
        }
        Ok(())
    }

    fn install(&mut self) -> Result<(), BinaryError> {
        let dir = self.at(&self.bin);
        let source = &self.config.plugin_source;
        let stamp = FileStamps::of(source, &dir);
        if stamp.is_some() && stamp == self.verified {
            return Ok(());
        }
        if binary::is_current(source, &dir)? {
            self.verified = stamp;
            return Ok(());
        }
        let target = self.on_host(&dir).join(INPOD_CNI).display().to_string();
        let before = self.record.clone();
        if before.binary.as_ref() != Some(&target) {
            let earlier = self.record.binary.replace(target);
            self.record.earlier_binaries.extend(earlier);
            self.save().map_err(|error| BinaryError::Write {
                path: self.config.record_dir(),
                source: std::io::Error::other(with_causes(&error)),
            })?;
        }
        let installed = binary::install(source, &dir);
        if installed.is_err() && before != self.record {
            // Nothing was installed, so the record must not name the file: a plugin that someone else installs later
            // must stay.
            self.record = before;
            self.save().unwrap_or_else(|error| {
                tracing::warn!(why = with_causes(&error), "Cannot write the record");
            });
        }
        self.metrics.installed(match &installed {
            Ok(Installed::Unchanged) => "unchanged",
            Ok(Installed::Written) => "written",
            Err(BinaryError::ReadOnly(_)) => "read-only",
            Err(BinaryError::Unusable { .. }) => "unusable",
            Err(_) => "failed",
        });
        if let Installed::Written = installed? {
            tracing::info!(dir = %self.bin.display(), "Installed the plugin");
        }
        Ok(())
    }

    /// Reconciles the chain. The inner error is a problem that needs an operator, or time.
    fn reconcile_chain(&mut self, now: Instant) -> Result<Result<(), String>, ChainError> {
        if let Err(problem) = self.ask_versions() {
            return Ok(Err(problem));
        }
        let conf = self.dirs.conf.display().to_string();
        if !self.record.files.is_empty() && self.record.conf_dir != conf {
            self.leave_chain(Restore::Everything)?;
        }
        let dir = self.conf_dir();
        files::remove_temporaries(&dir).map_err(|source| ChainError::Write {
            path: dir.clone(),
            source,
        })?;
        let directory = self.read_directory()?;
        let plan = self.desired.plan(&directory, &self.record)?;
        let steps = steps::diff(&plan, &directory, &self.record);
        let is_contested = steps.iter().any(|step| step.cause != Cause::First);
        let wait = self.backoff.delay(now);
        if is_contested && !wait.is_zero() {
            self.metrics.contended();
            let others = known_conflicts::unloaded_names(&dir);
            return Ok(Err(contention_message(
                &steps,
                self.backoff.streak(),
                wait,
                known_conflicts::remedy_for(&directory, &others),
            )));
        }
        self.record.conf_dir = conf;
        let updated_record = plan.updated_record(&self.desired, &directory, &self.record);
        self.update_record(with_modes(updated_record, &dir))?;
        self.apply(&dir, &steps)?;
        if is_contested {
            self.backoff.record_rewrite(now);
        }
        self.forget_settled(&plan)?;
        self.desired.check_effective(&self.read_directory()?)?;
        Ok(Ok(()))
    }

    pub(crate) fn leave_chain(&mut self, restore: Restore) -> Result<Vec<Step>, ChainError> {
        if !self.record.conf_dir.is_empty() {
            self.dirs.conf = PathBuf::from(&self.record.conf_dir);
        }
        let dir = self.conf_dir();
        files::remove_temporaries(&dir).map_err(|source| ChainError::Write {
            path: dir.clone(),
            source,
        })?;
        let directory = self.read_directory()?;
        let plan = removal::plan(&directory, &self.record, &self.desired, restore);
        let steps = steps::diff(&plan, &directory, &self.record);
        for step in &steps {
            steps::apply(&dir, step)?;
            self.metrics.rewritten("leaving");
            let list = directory.file(&step.name).and_then(NetworkFile::list);
            if let Some(kind) = list.and_then(Conflist::meta) {
                let file = &step.name;
                tracing::warn!(file, "Removed inpod from what {kind} calls: restart {kind}");
            }
        }
        self.forget_settled(&plan)?;
        // A later Cilium would restore the backups that Cilium made of inpod's files.
        for name in [&self.desired.owned_file, &self.desired.standalone_file] {
            let path = dir.join(format!("{name}.cilium_bak"));
            let removed = inpod_service::remove_if_exists(&path);
            removed.map_err(|source| ChainError::Write { path, source })?;
        }
        (self.dirs, self.desired.runtime) = find_dirs(&self.config);
        Ok(steps)
    }

    fn apply(&self, dir: &Path, steps: &[Step]) -> Result<(), ChainError> {
        for step in steps {
            steps::apply(dir, step)?;
            self.metrics.rewritten(step.cause.as_str());
            tracing::info!(
                file = step.name,
                cause = step.cause.as_str(),
                "Changed the chain"
            );
        }
        Ok(())
    }

    fn update_record(&mut self, record: Record) -> Result<(), ChainError> {
        if self.record != record {
            record.write(&self.config.record_dir())?;
            self.record = record;
        }
        Ok(())
    }

    fn forget_settled(&mut self, plan: &Plan) -> Result<(), ChainError> {
        let mut record = self.record.clone();
        record.files.retain(|name, _| !plan.forget.contains(name));
        self.update_record(record)
    }

    pub(crate) fn save(&self) -> Result<(), crate::error::RecordError> {
        self.record.write(&self.config.record_dir())
    }

    pub(crate) fn conf_dir(&self) -> PathBuf {
        self.at(&self.dirs.conf)
    }

    fn read_directory(&self) -> Result<Directory, ReadError> {
        Directory::read(&self.config.host_root, &self.dirs.conf)
    }

    /// Returns where a path of the host is in this mount namespace.
    pub(crate) fn at(&self, path: &Path) -> PathBuf {
        let root = &self.config.host_root;
        resolve(root, path).unwrap_or_else(|_| below(root, path))
    }

    /// Returns the path on the host, the reverse of [`Self::at`].
    fn on_host(&self, path: &Path) -> PathBuf {
        let root = fs::canonicalize(&self.config.host_root).unwrap_or_default();
        Path::new("/").join(path.strip_prefix(root).unwrap_or(path))
    }
}

/// Adds the mode of each file to the record, unless the file was changed before.
fn with_modes(mut record: Record, dir: &Path) -> Record {
    for (name, changed) in &mut record.files {
        if changed.mode.is_none() && changed.before.is_some() {
            let found = fs::metadata(dir.join(name));
            changed.mode = found.ok().map(|found| found.permissions().mode() & 0o7777);
        }
    }
    record
}

/// Takes the lock that allows one installer per node, in whatever container.
fn lock(dir: &Path) -> anyhow::Result<Flock<fs::File>> {
    let path = dir.join("lock");
    let file = uds::open_lock(&path).with_context(|| format!("cannot open {}", path.display()))?;
    // The child of a killed installer holds the lock until its execve.
    uds::lock_within_timeout(file).map_err(|error| {
        anyhow::anyhow!(
            "another installer is at work on this node ({}: {error}); stop it first",
            path.display()
        )
    })
}

/// Returns the directories from the settings, or else the directories of the runtime, and the runtime.
fn find_dirs(config: &Config) -> (Dirs, Runtime) {
    let (runtime, unreadable) = Runtime::find(&config.host_root, config.conf_dir.as_deref());
    for (path, why) in unreadable {
        tracing::debug!(path = %path.display(), why, "Cannot read the runtime's configuration");
    }
    let bin = config.bin_dir.as_ref().map(|dir| vec![dir.clone()]);
    let dirs = Dirs {
        conf: config
            .conf_dir
            .as_ref()
            .unwrap_or(&runtime.conf_dir)
            .clone(),
        bins: bin.unwrap_or_else(|| runtime.bin_dirs.clone()),
    };
    (dirs, runtime)
}

fn contention_message(steps: &[Step], streak: u32, wait: Duration, remedy: Option<&str>) -> String {
    let names: Vec<_> = steps.iter().map(|step| step.name.as_str()).collect();
    let remedy = remedy.unwrap_or(
        "find the component that writes to the directory (inotifywait, auditd) and stop it",
    );
    format!(
        "another component keeps reverting {}: rewritten {streak} times, next in {} s; {remedy}",
        names.join(", "),
        wait.as_secs().max(1)
    )
}
