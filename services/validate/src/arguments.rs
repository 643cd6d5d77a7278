//! Parses the command line and the environment.
//!
//! The program accepts every flag of `istio-iptables` in addition to its own flags, so that the program's image can run
//! the container of an unmodified Istio template (`istio-iptables ... --run-validation --skip-rule-apply`). Flags that
//! configure rules are ignored. Without the two flags of the template, `istio-iptables` would apply rules; this program
//! refuses to do so.

use std::{ffi::OsString, time::Duration};

use lexopt::{Arg, Parser, RawArgs};

use crate::probe_target::{Families, Family};

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

/// Environment variables of istio-iptables, with the equivalent flags.
const VARIABLES: [(&str, &str); 5] = [
    ("PROBE_TIMEOUT", "probe-timeout"),
    ("INBOUND_CAPTURE_PORT", "inbound-capture-port"),
    ("IPTABLES_PROBE_PORT", "iptables-probe-port"),
    ("RUN_VALIDATION", "run-validation"),
    ("SKIP_RULE_APPLY", "skip-rule-apply"),
];

/// The flags with a value, with their letters.
const WITH_VALUE: [(&str, &str); 6] = [
    ("", "timeout"),
    ("", "probe-timeout"),
    ("", "ip-family"),
    ("p", "envoy-port"),
    ("z", "inbound-capture-port"),
    ("", "iptables-probe-port"),
];

const SWITCHES: [(&str, &str); 4] = [
    ("h", "help"),
    ("", "version"),
    ("", "run-validation"),
    ("", "skip-rule-apply"),
];

/// Ignored flags of istio-iptables, which configure rules (services/docs/facts/istio-sidecar.md, 4.1): `validate`
/// detects the rules or need not know the details.
const IGNORED_WITH_VALUE: [(&str, &str); 16] = [
    ("e", "inbound-tunnel-port"),
    ("u", "proxy-uid"),
    ("g", "proxy-gid"),
    ("m", "istio-inbound-interception-mode"),
    ("b", "istio-inbound-ports"),
    ("d", "istio-local-exclude-ports"),
    ("c", "istio-exclude-interfaces"),
    ("i", "istio-service-cidr"),
    ("x", "istio-service-exclude-cidr"),
    ("q", "istio-outbound-ports"),
    ("o", "istio-local-outbound-ports-exclude"),
    ("k", "kube-virt-interfaces"),
    ("t", "istio-inbound-tproxy-mark"),
    ("r", "istio-inbound-tproxy-route-table"),
    ("", "network-namespace"),
    ("", "force-iptables-binary"),
];

const IGNORED_SWITCHES: [(&str, &str); 10] = [
    ("n", "dry-run"),
    ("", "redirect-dns"),
    ("", "drop-invalid"),
    ("", "dual-stack"),
    ("", "capture-all-dns"),
    ("", "cni-mode"),
    ("", "reconcile"),
    ("", "cleanup-only"),
    ("", "force-apply"),
    ("", "native-nftables"),
];

/// The name of the command in Istio's template; the arguments may start with the name.
const ISTIO_IPTABLES: &str = "istio-iptables";

/// Parses the environment variables of istio-iptables, and the arguments, which start after the program's name.
pub fn parse(
    arguments: impl Iterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Command, UsageError> {
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
    let mut draft = Draft {
        settings,
        validates: false,
        skips_rules: false,
    };
    for (name, flag) in VARIABLES {
        if let Some(value) = variable(name) {
            draft.set(flag, name, &value.to_string_lossy())?;
        }
    }
    let mut arguments = arguments.peekable();
    let program = arguments.next_if(|name| name == ISTIO_IPTABLES || name == "validate");
    let mut parser = Parser::from_args(arguments);
    while let Some(argument) = next(&mut parser)? {
        let (flag, takes_value) = find(&argument)?;
        let value = if takes_value {
            parser.value().map_err(|_| UsageError::NoValue(flag))?
        } else {
            parser.optional_value().unwrap_or_else(|| "true".into())
        };
        match flag {
            "help" => return Ok(Command::Print(HELP.to_owned())),
            "version" => return Ok(Command::Print(format!("validate {VERSION}\n"))),
            _ => draft.set(flag, flag, &value.to_string_lossy())?,
        }
    }
    if program.is_some_and(|name| name == ISTIO_IPTABLES) && !(draft.validates && draft.skips_rules)
    {
        return Err(UsageError::Rules);
    }
    Ok(Command::Validate(draft.settings))
}

/// Returns the next argument, and refuses `--`, which the parser would skip.
fn next(parser: &mut Parser) -> Result<Option<Arg<'_>>, UsageError> {
    let is_separator = |left: RawArgs<'_>| left.peek().is_some_and(|it| it == "--");
    if parser.try_raw_args().is_some_and(is_separator) {
        return Err(UsageError::Unknown("--".to_owned()));
    }
    parser
        .next()
        .map_err(|error| UsageError::Stray(error.to_string()))
}

/// Returns the long name of a flag, and whether the flag needs a value.
fn find(argument: &Arg<'_>) -> Result<(&'static str, bool), UsageError> {
    let is_meant = |(letter, name): &&(&str, &str)| match argument {
        Arg::Short(short) => letter.starts_with(*short),
        Arg::Long(long) => name == long,
        Arg::Value(_) => false,
    };
    let mut with_value = WITH_VALUE.iter().chain(&IGNORED_WITH_VALUE);
    if let Some((_, name)) = with_value.find(is_meant) {
        return Ok((name, true));
    }
    let mut switches = SWITCHES.iter().chain(&IGNORED_SWITCHES);
    if let Some((_, name)) = switches.find(is_meant) {
        return Ok((name, false));
    }
    Err(match argument {
        // Istio's logging flags are accepted, too. In the template, a "=" joins a logging flag and the flag's value.
        Arg::Long(name) if name.starts_with("log_") => return Ok(("log_*", false)),
        Arg::Long(name) => UsageError::Unknown(format!("--{name}")),
        Arg::Short(letter) => UsageError::Unknown(format!("-{letter}")),
        Arg::Value(text) if *text == "-" => UsageError::Unknown("-".to_owned()),
        Arg::Value(text) => UsageError::Stray(text.to_string_lossy().into_owned()),
    })
}

#[derive(Debug)]
struct Draft {
    settings: Settings,
    validates: bool,
    skips_rules: bool,
}

impl Draft {
    /// Sets the value of a flag, given by the flag or the variable `name`.
    fn set(&mut self, flag: &str, name: &'static str, value: &str) -> Result<(), UsageError> {
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
        match flag {
            "timeout" | "probe-timeout" => {
                let parsed = duration(value).filter(|time| !time.is_zero() && *time <= MAX_TIMEOUT);
                let wanted = "a duration between 1ms and 1h, such as 5s";
                self.settings.timeout = parsed.ok_or_else(|| wrong(wanted))?;
            }
            "ip-family" => {
                self.settings.families = match value {
                    "auto" => Families::Auto,
                    "ipv4" => Families::Only(Family::V4),
                    "ipv6" => Families::Only(Family::V6),
                    _ => return Err(wrong("auto, ipv4 or ipv6")),
                }
            }
            "inbound-capture-port" => self.settings.ports.inbound = port()?,
            "envoy-port" => self.settings.ports.outbound = port()?,
            "iptables-probe-port" => self.settings.ports.probe = port()?,
            "run-validation" => self.validates = truth()?,
            "skip-rule-apply" => self.skips_rules = truth()?,
            _ => {}
        }
        Ok(())
    }
}

/// Parses a duration in Go's format, without fractions: numbers followed by h, m, s or ms.
fn duration(text: &str) -> Option<Duration> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let (mut rest, mut total) = (text, 0_u64);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at_checked(digits)?;
        let unit = |(name, factor)| Some((after.strip_prefix(name)?, factor));
        let (next, factor) = units.into_iter().find_map(unit)?;
        total = total.checked_add(number.parse::<u64>().ok()?.checked_mul(factor)?)?;
        rest = next;
    }
    Some(Duration::from_millis(total))
}

#[cfg(test)]
mod tests;
