//! Parses the command line and the environment.
//!
//! The program accepts every flag of `istio-iptables` in addition to its own flags, so that the program's image can run
//! the container of an unmodified Istio template (`istio-iptables ... --run-validation --skip-rule-apply`). Flags that
//! configure rules are ignored. Without the two flags of the template, `istio-iptables` would apply rules; this program
//! refuses to do so.

mod flags;

use std::{
    ffi::{OsStr, OsString},
    time::Duration,
};

use crate::probe_target::{Families, Family};
use flags::{FLAGS, Flag, FlagKind};

/// The default timeout of istio-iptables.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// As `inpod_types::VERSION`, without the dependency.
const VERSION: &str = match option_env!("INPOD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

const HELP: &str = "\
Checks from inside a pod that its traffic is redirected to its proxy. Run it as
the proxy's user.

Usage: validate [--timeout 5s] [--ip-family auto|ipv4|ipv6]

  --timeout DURATION           how long to try (PROBE_TIMEOUT; also
                               --probe-timeout)
  --ip-family FAMILY           what has to be redirected: auto (families with an
                               address in the pod), ipv4 or ipv6
  --envoy-port, -p PORT        the proxy's port for outbound traffic (15001)
  --inbound-capture-port, -z PORT
                               the proxy's port for inbound traffic
                               (INBOUND_CAPTURE_PORT, 15006)
  --iptables-probe-port PORT   a port without a listener (IPTABLES_PROBE_PORT,
                               15002)

All other flags of istio-iptables are accepted and ignored.
Exit codes: 0 redirected, 126 not redirected, 1 not known, 2 invalid arguments.
";

#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Print(String),
    Validate(Settings),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time for all probes; always more than zero.
    pub timeout: Duration,
    /// The address families to validate.
    pub families: Families,
    pub ports: Ports,
}

/// TCP ports, used for both address families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The proxy's port for inbound traffic.
    pub inbound: u16,
    /// The proxy's port for outbound traffic.
    pub outbound: u16,
    /// The destination port of the probes, which must have no listener.
    pub probe: u16,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    #[error("unknown flag {0}; see --help")]
    Unknown(String),
    /// The argument is neither a flag nor the value of a flag.
    #[error("unexpected argument \"{0}\"; see --help")]
    Stray(String),
    #[error("{0} needs a value")]
    NoValue(&'static str),
    #[error("{0}: \"{1}\" is not {2}")]
    Value(&'static str, String, &'static str),
    #[error(
        "this program applies no rules: it replaces istio-iptables only with --run-validation and --skip-rule-apply"
    )]
    Rules,
}

/// Parses the environment variables of istio-iptables, and the arguments, which start after the program's name.
pub fn parse(
    arguments: impl Iterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Command, UsageError> {
    let mut draft = Draft::default();
    for flag in FLAGS {
        let value = flag.variable.and_then(&variable);
        if let (Some(name), Some(value)) = (flag.variable, value) {
            draft.set(name, flag.kind, &value.to_string_lossy())?;
        }
    }
    let mut arguments_left = Arguments::new(arguments);
    if let Some(name) = arguments_left.program() {
        draft.stands_for_istio = name == ISTIO_IPTABLES;
    }
    while let Some(argument) = arguments_left.next() {
        let (flag, given) = find(&argument)?;
        let value = match (given, flag.takes_value) {
            (Some(value), _) => value,
            (None, true) => arguments_left
                .next()
                .ok_or(UsageError::NoValue(flag.long))?,
            (None, false) => "true".to_owned(),
        };
        if flag.kind == FlagKind::Help {
            return Ok(Command::Print(HELP.to_owned()));
        }
        if flag.kind == FlagKind::Version {
            return Ok(Command::Print(format!("validate {VERSION}\n")));
        }
        draft.set(flag.long, flag.kind, &value)?;
    }
    draft.finish().map(Command::Validate)
}

/// The name of the command in Istio's template; the arguments may start with the name.
const ISTIO_IPTABLES: &str = "istio-iptables";

struct Arguments<I: Iterator<Item = OsString>>(std::iter::Peekable<I>);

impl<I: Iterator<Item = OsString>> Arguments<I> {
    fn new(arguments: I) -> Self {
        Self(arguments.peekable())
    }

    fn next(&mut self) -> Option<String> {
        self.0
            .next()
            .map(|argument| argument.to_string_lossy().into_owned())
    }

    /// Skips and returns the first argument if it names a program.
    fn program(&mut self) -> Option<&'static str> {
        let names = |argument: &OsStr| {
            [ISTIO_IPTABLES, "validate"]
                .into_iter()
                .find(|name| argument == *name)
        };
        let name = self.0.peek().and_then(|argument| names(argument))?;
        self.0.next();
        Some(name)
    }
}

/// Finds a flag and its value in the argument: `--flag`, `--flag=value`, `-f` or `-fvalue`.
fn find(argument: &str) -> Result<(Flag, Option<String>), UsageError> {
    let unknown = || UsageError::Unknown(argument.to_owned());
    if let Some(rest) = argument.strip_prefix("--") {
        let (name, value) = match rest.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (rest, None),
        };
        // Istio's logging flags are accepted, too. In the template, a "=" joins a logging flag and the flag's value.
        let log = name.starts_with("log_").then_some(flags::LOG);
        let mut known = FLAGS.iter().copied();
        let flag = known.find(|flag| flag.long == name).or(log);
        return Ok((flag.ok_or_else(unknown)?, value));
    }
    let rest = argument
        .strip_prefix('-')
        .ok_or_else(|| UsageError::Stray(argument.to_owned()))?;
    let mut letters = rest.chars();
    let letter = letters.next().ok_or_else(unknown)?;
    let mut known = FLAGS.iter().copied();
    let flag = known.find(|flag| flag.short == Some(letter));
    let value = letters.as_str();
    let value = value.strip_prefix('=').unwrap_or(value);
    let has_value = rest.len() > letter.len_utf8();
    Ok((
        flag.ok_or_else(unknown)?,
        has_value.then(|| value.to_owned()),
    ))
}

#[derive(Debug)]
struct Draft {
    settings: Settings,
    stands_for_istio: bool,
    validates: bool,
    skips_rules: bool,
}

impl Default for Draft {
    fn default() -> Self {
        let ports = Ports {
            inbound: 15006,
            outbound: 15001,
            probe: 15002,
        };
        let settings = Settings {
            timeout: DEFAULT_TIMEOUT,
            families: Families::Auto,
            ports,
        };
        Self {
            settings,
            stands_for_istio: false,
            validates: false,
            skips_rules: false,
        }
    }
}

impl Draft {
    fn set(&mut self, name: &'static str, kind: FlagKind, value: &str) -> Result<(), UsageError> {
        let wrong = |wanted| UsageError::Value(name, value.to_owned(), wanted);
        let port = || {
            let parsed = value.parse().ok().filter(|port| *port > 0);
            parsed.ok_or_else(|| wrong("a port, 1 to 65535"))
        };
        let truth = || match value {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
            _ => Err(wrong("true or false")),
        };
        match kind {
            FlagKind::Timeout => {
                let parsed = duration(value).filter(|time| !time.is_zero() && *time <= MAX_TIMEOUT);
                let wanted = "a duration between 1ms and 1h, such as 5s";
                self.settings.timeout = parsed.ok_or_else(|| wrong(wanted))?;
            }
            FlagKind::Families => {
                self.settings.families = match value {
                    "auto" => Families::Auto,
                    "ipv4" => Families::Only(Family::V4),
                    "ipv6" => Families::Only(Family::V6),
                    _ => return Err(wrong("auto, ipv4 or ipv6")),
                }
            }
            FlagKind::Inbound => self.settings.ports.inbound = port()?,
            FlagKind::Outbound => self.settings.ports.outbound = port()?,
            FlagKind::Probe => self.settings.ports.probe = port()?,
            FlagKind::RunValidation => self.validates = truth()?,
            FlagKind::SkipRules => self.skips_rules = truth()?,
            FlagKind::Help | FlagKind::Version | FlagKind::Nothing => {}
        }
        Ok(())
    }

    fn finish(self) -> Result<Settings, UsageError> {
        if self.stands_for_istio && !(self.validates && self.skips_rules) {
            return Err(UsageError::Rules);
        }
        Ok(self.settings)
    }
}

/// Parses a duration in Go's format, without fractions: numbers followed by h, m, s or ms.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut whole = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at_checked(digits)?;
        let end = after
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(after.len());
        let (unit, next) = after.split_at_checked(end)?;
        let milliseconds = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        let amount = number.parse::<u64>().ok()?.checked_mul(milliseconds)?;
        whole = whole.checked_add(Duration::from_millis(amount))?;
        rest = next;
    }
    (!text.is_empty()).then_some(whole)
}

#[cfg(test)]
mod tests;
