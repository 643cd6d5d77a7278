//! Brings the plugin and the chain into the desired state.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_service::uds;
use nix::fcntl::Flock;

use inpod_types::with_causes;

use crate::{
    Conflist, Directory, INPOD_CNI, NetworkFile, Runtime,
    backoff::RewriteBackoff,
    binary::{self, FileStamps},
    config::Config,
    directory::{below, file_names, resolve},
    error::{BinaryError, ChainError, RuntimeError},
    files, known_conflicts,
    metrics::Metrics,
    plan::{DesiredChain, Plan, PlanError, Restore},
    record::{Record, RecordError},
    steps::{self, Cause, Step},
    volatile::volatile_file_system,
};

/// The time within which events lead to a single reconcile.
pub(crate) const COALESCE_DELAY: Duration = Duration::from_millis(5);

const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The least time between two changes that follow the primary.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// The number of races with the owner of a file that are repeated at once.
const MAX_RACES: u32 = 10;

/// Changes the CNI directories, and remembers the changes that were made.
#[derive(Debug)]
pub struct Installer {
    pub(crate) config: Config,
    pub(crate) desired: DesiredChain,
    pub(crate) record: Record,
    /// The directory with the plugin: the runtime's first that has the plugin or can be written.
    pub(crate) bin: PathBuf,
    metrics: Metrics,
    backoff: RewriteBackoff,
    /// The problem that was logged last, so that a problem is logged once instead of at every reconcile.
    last_problem: String,
    /// The stamps with which the installed plugin was found current.
    verified: Option<FileStamps>,
    /// The time of the last change that followed the primary.
    followed: Option<Instant>,
    races: u32,
    /// The lock that excludes other installers on this node.
    _lock: Flock<fs::File>,
}

#[derive(Debug)]
pub struct Outcome {
    pub(crate) conditions: [(&'static str, Result<(), String>); 5],
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
        let shown = dir.display();
        files::create_private_directory(&dir).with_context(|| {
            format!("cannot create {shown}; check that it is mounted and writable")
        })?;
        let lock = lock(&dir)?;
        files::remove_temporaries(&dir).with_context(|| format!("cannot clean up {shown}"))?;
        let mut desired = DesiredChain::new(&config);
        desired.runtime = find_runtime(&config).unwrap_or_default();
        let bin = desired.runtime.bin_dirs.first().cloned();
        Ok(Self {
            _lock: lock,
            record: Record::read(&dir)?,
            bin: bin.unwrap_or_default(),
            desired,
            followed: None,
            races: 0,
            backoff: RewriteBackoff::default(),
            verified: None,
            last_problem: String::new(),
            metrics,
            config,
        })
    }

    pub(crate) fn reconcile(&mut self, now: Instant) -> Outcome {
        let binary = self.reconcile_binary();
        // The chain waits for the plugin, because an entry without a plugin fails every pod. If the entry exists
        // already, there is nothing to wait for.
        let chain = if binary.is_ok() || !self.record.files.is_empty() {
            self.reconcile_chain(now)
        } else {
            Err(ChainError::NoPlugin)
        };
        let is_raced = matches!(chain, Err(ChainError::Raced(_)));
        self.races = if is_raced { self.races + 1 } else { 0 };
        let retry_after = match &chain {
            Ok(()) => binary.is_err().then_some(RETRY_INTERVAL),
            Err(ChainError::Raced(_)) if self.races <= MAX_RACES => Some(COALESCE_DELAY),
            Err(ChainError::Contested { wait, .. } | ChainError::Following { wait, .. }) => {
                Some(*wait)
            }
            Err(_) => Some(RETRY_INTERVAL),
        };
        let binary = binary.map_err(|error| with_causes(&error));
        let chain = chain.map_err(|error| with_causes(&error));
        self.log_problem(binary.as_ref().and(chain.as_ref()).err());
        let conditions = [
            ("binary", binary),
            ("chain", chain),
            ("reboot", self.check_reboot()),
            ("handlers", self.check_handlers()),
            ("runtime", self.check_runtime()),
        ];
        Outcome {
            conditions,
            retry_after,
        }
    }

    fn log_problem(&mut self, problem: Option<&String>) {
        let why = problem.map_or("", String::as_str);
        // A problem of which only the delay has changed is not logged again.
        let stable_part = why.split(", next in ").next().unwrap_or_default();
        if !why.is_empty() && self.last_problem != stable_part {
            tracing::warn!(why, "inpod is not installed completely");
        }
        self.last_problem = stable_part.to_owned();
    }

    /// Checks that pods wait for inpod after a reboot.
    fn check_reboot(&self) -> Result<(), String> {
        let dir = &self.desired.runtime.conf_dir;
        match volatile_file_system(&self.config.host_root, dir) {
            None => Ok(()),
            Some(file_system) => Err(format!(
                "{} does not survive a reboot ({file_system}): pods then start outside the mesh until inpod runs, so use the start-up taint, and drain the node before a reboot",
                dir.display()
            )),
        }
    }

    /// Checks the handlers of containerd that have a CNI directory of their own, which the installer does not change.
    fn check_handlers(&self) -> Result<(), String> {
        let root = &self.config.host_root;
        let runtime = &self.desired.runtime;
        let without_us = runtime.handlers.iter().filter(|(_, dir)| {
            let directory = Directory::read(root, dir).unwrap_or_default();
            let first = directory.files.first().and_then(NetworkFile::list);
            **dir != runtime.conf_dir && first.is_none_or(|list| list.calls().is_empty())
        });
        let named = without_us.map(|(name, dir)| format!("{name} ({})", dir.display()));
        let named: Vec<_> = named.collect();
        if named.is_empty() {
            return Ok(());
        }
        Err(format!(
            "pods start without inpod with the runtime handler {}: remove its cni_conf_dir",
            named.join(", ")
        ))
    }

    /// Checks that the settings name directories of the runtime.
    fn check_runtime(&self) -> Result<(), String> {
        let (found, _) = Runtime::find(&self.config.host_root, self.config.conf_dir.as_deref());
        let Some(source) = &found.source else {
            return Ok(());
        };
        let used = &self.desired.runtime;
        let is_one =
            |dir: &Path, dirs: &[PathBuf]| dirs.iter().any(|other| self.at(other) == self.at(dir));
        let conf_dirs = [found.conf_dir];
        let wrong = [
            ("conf_dir", &used.conf_dir, &conf_dirs[..]),
            ("bin_dir", &self.bin, &found.bin_dirs),
        ];
        let wrong = wrong.into_iter().find(|(_, dir, dirs)| !is_one(dir, dirs));
        wrong.map_or(Ok(()), |(setting, dir, dirs)| {
            Err(format!(
                "{setting} is {}, but {} sets {}: set {setting} to the runtime's",
                dir.display(),
                source.display(),
                dirs.iter()
                    .map(|dir| dir.display().to_string())
                    .collect::<Vec<_>>()
                    .join(", ")
            ))
        })
    }

    /// Installs the plugin in the first directory of the runtime's search that allows it.
    fn reconcile_binary(&mut self) -> Result<(), BinaryError> {
        // Until the file can be read, the directories of the last reconcile stay, and nothing is changed.
        self.desired.runtime = find_runtime(&self.config)?;
        let mut first_error = None;
        for dir in self.desired.runtime.bin_dirs.clone() {
            self.bin = dir;
            match self.install() {
                // The runtime would find an outdated plugin there before one in a later directory.
                Err(
                    error @ (BinaryError::NoDirectory(_)
                    | BinaryError::ReadOnly(_)
                    | BinaryError::Unusable { .. }),
                ) if !self.at(&self.bin).join(INPOD_CNI).exists() => {
                    first_error = first_error.or(Some(error));
                }
                result => return result,
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn install(&mut self) -> Result<(), BinaryError> {
        let dir = self.at(&self.bin);
        let source = self.config.plugin_source.clone();
        let stamps = FileStamps::of(&source, &dir);
        if stamps.is_some() && stamps == self.verified {
            return Ok(());
        }
        if binary::is_current(&source, &dir)? {
            self.verified = stamps;
            return Ok(());
        }
        let target = self.on_host(&dir).join(INPOD_CNI).display().to_string();
        let before = self.record.clone();
        self.update_record(|record| {
            if record.binary.as_ref() != Some(&target) {
                let earlier = record.binary.replace(target);
                record.earlier_binaries.extend(earlier);
            }
        })?;
        let installed = binary::install(&source, &dir);
        self.metrics.installed(match &installed {
            Ok(()) => "written",
            Err(BinaryError::ReadOnly(_)) => "read-only",
            Err(BinaryError::Unusable { .. }) => "unusable",
            Err(_) => "failed",
        });
        if installed.is_ok() {
            tracing::info!(dir = %self.bin.display(), "Installed the plugin");
        } else if let Err(error) = self.update_record(|record| *record = before) {
            // A record that names the file although nothing was installed would remove a plugin that someone else
            // installs later.
            tracing::warn!(why = with_causes(&error), "Cannot write the record");
        }
        installed
    }

    fn reconcile_chain(&mut self, now: Instant) -> Result<(), ChainError> {
        find_runtime(&self.config)?;
        // A directory can become noexec, so the plugin is asked each time.
        let versions = binary::ask_versions(&self.at(&self.bin).join(INPOD_CNI));
        self.desired.spoken = versions.map_err(|problem| ChainError::Plugin {
            dir: self.bin.clone(),
            problem,
        })?;
        // Without its plugin, istio-cni's entry would fail every pod.
        self.desired.restore = if self.has_istio_cni() {
            Restore::Everything
        } else {
            Restore::ExceptIstioCni
        };
        let conf = self.desired.runtime.conf_dir.clone();
        if !self.record.files.is_empty() && Path::new(&self.record.conf_dir) != conf {
            self.leave_chain(self.desired.restore)?;
        }
        let directory = self.clean_directory(&conf)?;
        let planned = self.desired.plan(&directory, &self.record);
        if matches!(planned, Err(PlanError::Networks { .. })) {
            // With the copy, pods would have one network twice.
            self.leave_chain(self.desired.restore)?;
        }
        let plan = planned?;
        let steps = steps::diff(&plan, &directory, &self.record);
        let has = |cause| steps.iter().any(|step| step.cause == cause);
        let (is_contested, is_following) = (has(Cause::TakenAway), has(Cause::Followed));
        let next = self.followed.map(|last| last + FOLLOW_INTERVAL);
        if let Some(next) = next.filter(|next| is_following && now < *next) {
            let (files, wait) = (step_names(&steps), next.duration_since(now));
            return Err(ChainError::Following { files, wait });
        }
        let wait = self.backoff.delay(now);
        if is_contested && !wait.is_zero() {
            self.metrics.contended();
            let names = file_names(&self.at(&conf));
            return Err(ChainError::Contested {
                files: step_names(&steps),
                streak: self.backoff.streak(),
                wait,
                remedy: known_conflicts::remedy_for(&directory, &names),
            });
        }
        self.apply(&conf, &plan, &steps)?;
        if is_contested {
            self.backoff.record_rewrite(now);
        }
        if is_following {
            self.followed = Some(now);
        }
        let directory = Directory::read(&self.config.host_root, &conf)?;
        Ok(self.desired.check_effective(&directory)?)
    }

    /// Removes inpod from the chain, and returns the changes.
    pub(crate) fn leave_chain(&mut self, restore: Restore) -> Result<Vec<Step>, ChainError> {
        let conf = match self.record.conf_dir.as_str() {
            "" => self.desired.runtime.conf_dir.clone(),
            dir => dir.into(),
        };
        let directory = self.clean_directory(&conf)?;
        let plan = self.desired.removal(&directory, &self.record, restore)?;
        let steps = steps::diff(&plan, &directory, &self.record);
        self.apply(&conf, &plan, &steps)?;
        for file in steps.iter().map(|step| &step.name) {
            let list = directory.file(file).and_then(NetworkFile::list);
            if let Some(kind) = list.and_then(Conflist::meta) {
                tracing::warn!(file, "Removed inpod from what {kind} calls: restart {kind}");
            }
        }
        // A later Cilium would restore the backups that Cilium made of inpod's files.
        for name in [&self.desired.owned_file, &self.desired.standalone_file] {
            let path = self.at(&conf).join(format!("{name}.cilium_bak"));
            let removed = inpod_service::remove_if_exists(&path);
            removed.map_err(|source| ChainError::Write { path, source })?;
        }
        Ok(steps)
    }

    /// Applies the steps of a plan. The record names a change before the change is made, and until it is reverted.
    fn apply(&mut self, conf: &Path, plan: &Plan, steps: &[Step]) -> Result<(), ChainError> {
        self.update_record(|record| {
            record.conf_dir = conf.display().to_string();
            record.files.extend(plan.changed.clone());
        })?;
        for step in steps {
            steps::apply(&self.at(conf), step)?;
            let leaving = plan.changed.is_empty().then_some("leaving");
            let cause = leaving.unwrap_or(step.cause.as_str());
            self.metrics.rewritten(cause);
            tracing::info!(file = step.name, cause, "Changed the chain");
        }
        self.update_record(|record| {
            record.files.clone_from(&plan.changed);
            record.joined.clone_from(&plan.joined);
        })?;
        Ok(())
    }

    pub(crate) fn update_record(
        &mut self,
        edit: impl FnOnce(&mut Record),
    ) -> Result<(), RecordError> {
        let mut record = self.record.clone();
        edit(&mut record);
        if self.record != record {
            record.write(&self.config.record_dir())?;
            self.record = record;
        }
        Ok(())
    }

    /// Returns the files of a directory without the temporary files of a killed installer.
    fn clean_directory(&self, conf: &Path) -> Result<Directory, ChainError> {
        let path = self.at(conf);
        let removed = files::remove_temporaries(&path);
        removed.map_err(|source| ChainError::Write { path, source })?;
        Ok(Directory::read(&self.config.host_root, conf)?)
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

/// Returns the runtime, with the directories from the settings if these are set.
///
/// # Errors
///
/// Fails if a file that may set the directories cannot be read.
fn find_runtime(config: &Config) -> Result<Runtime, RuntimeError> {
    let (mut runtime, unreadable) = Runtime::find(&config.host_root, config.conf_dir.as_deref());
    let is_set = config.conf_dir.is_some() && config.bin_dir.is_some();
    if let Some((path, problem)) = unreadable.into_iter().next().filter(|_| !is_set) {
        return Err(RuntimeError { path, problem });
    }
    runtime.override_dirs(
        config.conf_dir.clone(),
        config.bin_dir.clone().into_iter().collect(),
    );
    Ok(runtime)
}

pub(crate) fn step_names(steps: &[Step]) -> String {
    let names: Vec<_> = steps.iter().map(|step| step.name.as_str()).collect();
    names.join(", ")
}
