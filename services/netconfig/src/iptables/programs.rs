//! The programs of iptables on this machine: location, release, execution.

use std::{
    collections::BTreeMap,
    fmt, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use inpod_linux::Netns;

use super::{
    lock::{self, Session},
    run::Run,
};
use crate::backend::ProgramError;
use crate::backend::Variant;
use crate::family::Family;

/// Instead of `PATH`, which a caller could choose.
const DIRECTORIES: [&str; 5] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin"];

/// This process's binary, even if the file was replaced.
const RUNNER: &str = "/proc/self/exe";

/// Of one run. A pod's rules take milliseconds; the rest is for locks.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Exists even if IPv6 is disabled.
const IPV6: &str = "/proc/sys/net/ipv6";

/// First whose iptables-legacy-restore can wait for its lock (`-w`).
const FIRST_RELEASE_WITH_WAIT: Version = Version([1, 6, 2]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) variant: Variant,
    pub(super) family: Family,
    pub(super) action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Save,
    Restore,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self.family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let variant = match self.variant {
            Variant::Nft => "nft",
            Variant::Legacy => "legacy",
        };
        let action = match self.action {
            Action::Save => "save",
            Action::Restore => "restore",
        };
        write!(f, "{family}-{variant}-{action}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version([u16; 3]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self([major, minor, patch]) = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

impl FromStr for Version {
    type Err = ();

    /// Parses `--version`: `iptables-save v1.8.9 (legacy)`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let numbers = |word: &str| {
            let mut numbers = word.strip_prefix('v')?.split('.').map(str::parse::<u16>);
            let mut next = || numbers.next().unwrap_or(Ok(0)).ok();
            Some(Self([next()?, next()?, next()?]))
        };
        text.split_whitespace().find_map(numbers).ok_or(())
    }
}

#[derive(Clone, Debug, Default)]
pub struct Programs {
    found: BTreeMap<String, PathBuf>,
    versions: Vec<(Variant, Version)>,
    runner: PathBuf,
    locks: PathBuf,
    timeout: Duration,
}

impl Programs {
    /// Searches `/usr/sbin`, `/sbin`, `/usr/bin`, `/bin` and `/usr/local/sbin`, and queries versions. `locks` is a
    /// dedicated directory below the run directory.
    pub fn search(locks: &Path) -> Self {
        Self::search_in(&DIRECTORIES.map(Path::new), Path::new(RUNNER), locks)
    }

    /// Uses other directories and another binary of netconfig, for tests.
    pub fn search_in(directories: &[&Path], runner: &Path, locks: &Path) -> Self {
        if let Err(error) = lock::prepare(locks) {
            tracing::warn!(path = %locks.display(), %error, "Cannot prepare the lock directory");
        }
        let all = Variant::ALL.into_iter().flat_map(programs_of);
        let find = |program: Program| Some((program.to_string(), find(directories, program)?));
        let found = Self {
            found: all.filter_map(find).collect(),
            versions: Vec::new(),
            runner: runner.to_owned(),
            locks: locks.to_owned(),
            timeout: DEFAULT_TIMEOUT,
        };
        let version = |variant| Some((variant, found.query_version(variant)?));
        Self {
            versions: Variant::ALL.into_iter().filter_map(version).collect(),
            ..found
        }
    }

    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    pub fn has(&self, variant: Variant) -> bool {
        self.missing(variant).is_empty()
    }

    /// Ignores those for IPv6 if the kernel has none.
    pub fn missing(&self, variant: Variant) -> Vec<String> {
        let needed = programs_of(variant).filter(|program| families().contains(&program.family));
        let names = needed.map(|program| program.to_string());
        names
            .filter(|name| !self.found.contains_key(name))
            .collect()
    }

    pub(crate) fn version(&self, variant: Variant) -> Option<Version> {
        let mut versions = self.versions.iter();
        let known = versions.find(|(known, _)| *known == variant);
        known.map(|(_, version)| *version)
    }

    /// Waits until no other process uses iptables in the netns.
    pub(super) fn session(&self, variant: Variant, netns: &Netns) -> Result<Session, ProgramError> {
        if self.has(variant) {
            Session::open(&self.locks, netns, self.timeout)
        } else {
            Err(self.missing_error(variant))
        }
    }

    pub(super) fn run(
        &self,
        program: Program,
        netns: &Netns,
        script: &str,
        session: &Session,
    ) -> Result<String, ProgramError> {
        let run = Run {
            runner: &self.runner,
            netns: Some(netns),
            program: self.path(program)?,
            arguments: self.arguments(program),
            script,
            locks: Some((session.program_lock(), session.xtables_lock())),
            timeout: self.timeout,
        };
        run.output()
    }

    /// Returns the nat table of the node's netns as printed. All processes on the node share its lock.
    pub(crate) fn save_on_node(
        &self,
        variant: Variant,
        family: Family,
    ) -> Result<String, ProgramError> {
        let program = Program {
            variant,
            family,
            action: Action::Save,
        };
        self.run_on_node(program, vec!["-t".to_owned(), "nat".to_owned()], "")
    }

    pub(crate) fn restore_on_node(
        &self,
        variant: Variant,
        family: Family,
        script: &str,
    ) -> Result<(), ProgramError> {
        let program = Program {
            variant,
            family,
            action: Action::Restore,
        };
        self.run_on_node(program, self.arguments(program), script)
            .map(drop)
    }

    fn run_on_node(
        &self,
        program: Program,
        arguments: Vec<String>,
        script: &str,
    ) -> Result<String, ProgramError> {
        let run = Run {
            runner: &self.runner,
            netns: None,
            program: self.path(program)?,
            arguments,
            script,
            locks: None,
            timeout: self.timeout,
        };
        run.output()
    }

    fn path(&self, program: Program) -> Result<&Path, ProgramError> {
        let path = self.found.get(&program.to_string());
        path.map(PathBuf::as_path)
            .ok_or_else(|| self.missing_error(program.variant))
    }

    fn missing_error(&self, variant: Variant) -> ProgramError {
        ProgramError::Missing {
            variant,
            programs: self.missing(variant),
        }
    }

    fn arguments(&self, program: Program) -> Vec<String> {
        let mut arguments = Vec::new();
        if program.action == Action::Restore {
            arguments.push("--noflush".to_owned());
            if self.waits_for_lock(program.variant) {
                // Whole seconds, and the program has to give up before its own timeout.
                let seconds = self.timeout.as_secs().saturating_sub(1).max(1);
                arguments.extend(["-w".to_owned(), seconds.to_string()]);
            }
        }
        arguments
    }

    /// Returns whether restore takes a lock and can wait for it.
    fn waits_for_lock(&self, variant: Variant) -> bool {
        let version = self.version(variant);
        variant == Variant::Legacy
            && version.is_some_and(|version| version >= FIRST_RELEASE_WITH_WAIT)
    }

    fn query_version(&self, variant: Variant) -> Option<Version> {
        let run = Run {
            runner: &self.runner,
            netns: None,
            program: self.path(programs_of(variant).next()?).ok()?,
            arguments: vec!["--version".to_owned()],
            script: "",
            locks: None,
            timeout: self.timeout,
        };
        match run.output() {
            Ok(output) => output.parse().ok(),
            Err(error) => {
                tracing::warn!(%variant, %error, "Cannot read the version of iptables");
                None
            }
        }
    }
}

pub(super) fn families() -> &'static [Family] {
    if Path::new(IPV6).exists() {
        &Family::ALL
    } else {
        &[Family::V4]
    }
}

fn programs_of(variant: Variant) -> impl Iterator<Item = Program> {
    Family::ALL.into_iter().flat_map(move |family| {
        [Action::Save, Action::Restore].map(|action| Program {
            variant,
            family,
            action,
        })
    })
}

fn find(directories: &[&Path], program: Program) -> Option<PathBuf> {
    let mut candidates = directories
        .iter()
        .map(|path| path.join(program.to_string()));
    candidates.find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    let found = fs::metadata(path);
    found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_out_of_what_programs_say() {
        let version = |text: &str| text.parse::<Version>().map(|version| version.to_string());
        assert_eq!(
            version("iptables-nft-save v1.8.9 (nf_tables)").unwrap(),
            "1.8.9"
        );
        assert_eq!(version("iptables-save v1.8 (legacy)").unwrap(), "1.8.0");
        assert_eq!(version("iptables-save v1.8.10"), Ok("1.8.10".to_owned()));
        assert!(
            "iptables-save: unrecognized option"
                .parse::<Version>()
                .is_err()
        );
        assert!(
            Version([1, 6, 10]) > FIRST_RELEASE_WITH_WAIT
                && Version([1, 6, 1]) < FIRST_RELEASE_WITH_WAIT
        );
    }

    #[test]
    fn what_is_not_there_is_named_and_what_is_no_program_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("iptables-nft-save"), "no program").unwrap();
        let locks = directory.path().join("locks");
        let found = Programs::search_in(&[directory.path()], Path::new("/bin/false"), &locks);
        let missing = found.missing(Variant::Nft);
        assert!(
            missing.contains(&"iptables-nft-save".to_owned()),
            "{missing:?}"
        );
        assert!(
            missing.contains(&"iptables-nft-restore".to_owned()),
            "{missing:?}"
        );
        assert!(!found.has(Variant::Legacy));
    }
}
