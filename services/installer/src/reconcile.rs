//! Brings the plugin and the chain into the desired state.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::{Directory, INPOD_CNI};
use anyhow::Context as _;
use inpod_service::uds;
use nix::fcntl::Flock;

use inpod_types::with_causes;

use crate::{
    backoff::Backoff,
    binary::{self, FileStamps, Installed},
    config::Config,
    error::{BinaryError, ChainError},
    files, known_conflicts,
    metrics::Metrics,
    plan::{DesiredChain, Plan},
    record::Record,
    removal::{self, Restore},
    steps::{self, Cause, Step},
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
    metrics: Metrics,
    backoff: Backoff,
    /// The problem that was logged last, so that a problem is logged once instead of at every reconcile.
    last_problem: String,
    /// The stamps with which the installed plugin was found current.
    verified: Option<FileStamps>,
    /// The lock that excludes other installers on this node.
    _lock: Flock<fs::File>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    pub conf: PathBuf,
    pub bin: PathBuf,
}

#[derive(Debug)]
pub struct Outcome {
    pub(crate) binary: Result<(), String>,
    pub(crate) chain: Result<(), String>,
    /// An error here keeps containerd from loading any network; other runtimes skip invalid files.
    pub(crate) directory: Result<(), String>,
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
        Ok(Self {
            _lock: lock,
            record: Record::read(&dir)?,
            desired: DesiredChain::new(&config),
            dirs: dirs(&config),
            backoff: Backoff::default(),
            verified: None,
            last_problem: String::new(),
            metrics,
            config,
        })
    }

    pub(crate) fn reconcile(&mut self, now: Instant) -> Outcome {
        self.dirs = dirs(&self.config);
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
            directory: self.check_directory(),
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

    fn check_directory(&self) -> Result<(), String> {
        let directory = Directory::read(&self.conf_dir()).map_err(|error| with_causes(&error))?;
        match directory.blocking_files().next() {
            None => Ok(()),
            Some((name, why)) => Err(format!(
                "containerd loads no network while {name} is invalid: {why}; repair or remove it"
            )),
        }
    }

    fn reconcile_binary(&mut self) -> Result<(), BinaryError> {
        let dir = self.config.on_host(&self.dirs.bin);
        let source = &self.config.plugin_source;
        let stamp = FileStamps::of(source, &dir);
        if stamp.is_some() && stamp == self.verified {
            return Ok(());
        }
        if binary::is_current(source, &dir)? {
            self.verified = stamp;
            return Ok(());
        }
        let target = self.dirs.bin.join(INPOD_CNI).display().to_string();
        let was_recorded = self.record.binary.as_ref() == Some(&target);
        if !was_recorded {
            self.record.binary = Some(target);
            self.save().map_err(|error| BinaryError::Write {
                path: self.config.record_dir(),
                source: std::io::Error::other(with_causes(&error)),
            })?;
        }
        let installed = binary::install(source, &dir);
        if installed.is_err() && !was_recorded {
            // Nothing was installed, so the record must not name the file: a plugin that someone else installs later
            // must stay.
            self.record.binary = None;
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
            tracing::info!(dir = %self.dirs.bin.display(), "Installed the plugin");
        }
        Ok(())
    }

    /// Reconciles the chain. The inner error is a problem that needs an operator, or time.
    fn reconcile_chain(&mut self, now: Instant) -> Result<Result<(), String>, ChainError> {
        let conf = self.dirs.conf.display().to_string();
        if !self.record.files.is_empty() && self.record.conf_dir != conf {
            self.leave_chain(Restore::Everything)?;
        }
        let dir = self.conf_dir();
        files::remove_temporaries(&dir).map_err(|source| ChainError::Write {
            path: dir.clone(),
            source,
        })?;
        let directory = Directory::read(&dir)?;
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
        self.desired.check_effective(&Directory::read(&dir)?)?;
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
        let directory = Directory::read(&dir)?;
        let plan = removal::plan(&directory, &self.record, &self.desired, restore);
        let steps = steps::diff(&plan, &directory, &self.record);
        for step in &steps {
            steps::apply(&dir, step)?;
            self.metrics.rewritten("leaving");
        }
        self.forget_settled(&plan)?;
        self.desired
            .remove_backups(&dir)
            .map_err(|source| ChainError::Write { path: dir, source })?;
        self.dirs = dirs(&self.config);
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
        self.config.on_host(&self.dirs.conf)
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

/// Returns the directories from the settings, or else the directories of the runtime.
fn dirs(config: &Config) -> Dirs {
    let (found, unreadable) = crate::find_dirs(&config.host_root);
    for (path, why) in unreadable {
        tracing::debug!(path = %path.display(), why, "Cannot read the runtime's configuration");
    }
    let bin = found.bin_dirs.into_iter().next();
    let bin = config.bin_dir.clone().or(bin);
    Dirs {
        conf: config.conf_dir.clone().unwrap_or(found.conf_dir),
        bin: bin.unwrap_or_else(|| PathBuf::from("/opt/cni/bin")),
    }
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
