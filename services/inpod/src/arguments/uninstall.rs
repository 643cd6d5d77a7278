//! Arguments of `uninstall` and `handover`.

use std::{path::PathBuf, time::Duration};

use clap::{Arg, ArgMatches, Command};

use super::{path, string, text};

/// Selects how much of inpod stays on the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Withdraws pods and reverts all changes.
    Uninstall,
    /// Keeps rules, listeners and annotations for the next agent.
    Handover,
}

impl Mode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Uninstall => "uninstall",
            Self::Handover => "handover",
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct UninstallOptions {
    pub(crate) mode: Mode,
    pub(crate) namespace: Option<String>,
    pub(crate) daemonset: String,
    pub(crate) timeout: Duration,
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// Accepts `90`, `90s`, `5m` or `1h`.
fn duration(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("", 1)];
    let unit = units.iter().find(|(unit, _)| text.ends_with(unit));
    let (unit, seconds) = unit.copied().unwrap_or(("", 1));
    let number: Option<u32> = text.strip_suffix(unit).and_then(|it| it.parse().ok());
    match number {
        Some(number) if number > 0 => Ok(Duration::from_secs(u64::from(number) * seconds)),
        Some(_) | None => Err("expected a duration such as 90s or 5m".to_owned()),
    }
}

fn arguments() -> [Arg; 4] {
    [
        text(
            "namespace",
            "Namespace of inpod; the namespace of the kubeconfig's context if omitted",
        )
        .short('n'),
        text(
            "daemonset",
            "Name of the agent's DaemonSet, and of the label app.kubernetes.io/name on its pods",
        )
        .default_value("inpod"),
        // Replaces the global option of the same name, which limits the answer of one service.
        Arg::new("timeout")
            .long("timeout")
            .value_name("TIME")
            .value_parser(duration)
            .default_value("5m")
            .help("How long to wait for the nodes, such as 90s or 5m"),
        path(
            "kubeconfig",
            "Kubeconfig file; found like kubectl does, or the pod's service account, if omitted",
        ),
    ]
}

pub(super) fn uninstall() -> Command {
    Command::new("uninstall")
        .about("Remove inpod from every node: withdraw all pods and revert every change to the host. Uses your Kubernetes credentials; run it before helm uninstall")
        .args(arguments())
}

pub(super) fn handover() -> Command {
    Command::new("handover")
        .about("Remove inpod from every node but keep rules, listeners and annotations for the agent that replaces it. Uses your Kubernetes credentials")
        .args(arguments())
}

pub(super) fn options(mode: Mode, matches: &ArgMatches) -> UninstallOptions {
    UninstallOptions {
        mode,
        namespace: string(matches, "namespace"),
        daemonset: string(matches, "daemonset").unwrap_or_default(),
        timeout: matches.get_one("timeout").copied().unwrap_or_default(),
        kubeconfig: matches.get_one::<PathBuf>("kubeconfig").cloned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, ParseError, tests::parse},
        *,
    };

    fn parsed(line: &str) -> UninstallOptions {
        let Command::Uninstall(options) = parse(line).unwrap().command else {
            panic!("{line}");
        };
        options
    }

    #[test]
    fn uninstall_and_handover_differ_in_their_mode() {
        for (line, mode) in [
            ("inpod uninstall", Mode::Uninstall),
            ("inpod handover", Mode::Handover),
        ] {
            assert_eq!(parsed(line).mode, mode, "{line}");
        }
        let options = parsed("inpod uninstall -n mesh --timeout 90s");
        assert_eq!(options.timeout, Duration::from_secs(90));
        assert_eq!(
            (options.namespace.as_deref(), options.daemonset.as_str()),
            (Some("mesh"), "inpod")
        );
        for line in [
            "inpod handover --timeout 0m",
            "inpod uninstall --mode uninstall",
        ] {
            assert!(matches!(parse(line), Err(ParseError::Usage(_))), "{line}");
        }
    }
}
