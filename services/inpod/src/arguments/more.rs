//! The command lines of `doctor`, `bundle` and `leave`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Arg, ArgMatches, Command, parser::ValueSource, value_parser};

use super::{flag, output};
use crate::{
    doctor::{Examination, Places},
    inject::InjectOrder,
    root::Root,
};

/// What is to be collected.
#[derive(Clone, Debug)]
pub(crate) struct BundleOrder {
    pub(crate) examination: Examination,
    /// A file that ends in `.tar`, or a directory.
    pub(crate) output: PathBuf,
    pub(crate) redact_addresses: bool,
    /// Further files, besides the logs of inpod's pods.
    pub(crate) logs: Vec<PathBuf>,
}

/// How inpod goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Without a trace.
    Uninstall,
    /// Leaving rules, listeners and annotations to another agent.
    Handover,
}

impl Mode {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Uninstall => "uninstall",
            Self::Handover => "handover",
        }
    }
}

/// What is to be left, and how.
#[derive(Clone, Debug)]
pub(crate) struct LeaveOrder {
    pub(crate) mode: Mode,
    pub(crate) namespace: Option<String>,
    pub(crate) daemonset: String,
    pub(crate) patience: Duration,
    pub(crate) kubeconfig: Option<PathBuf>,
}

fn path(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name("PATH")
        .value_parser(value_parser!(PathBuf))
        .help(help)
}

fn text(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("NAME").help(help)
}

/// Where a node is and what is where on it; all but the first as the node sees it.
fn places() -> [Arg; 5] {
    [
        path(
            "host-root",
            "Where the node's root directory is: /host in a debug pod",
        )
        .default_value("/"),
        text(
            "cni-conf-dir",
            "Where the runtime reads networks; else its configuration says it",
        )
        .value_name("PATH"),
        text(
            "cni-bin-dir",
            "Where the runtime reads plugins; else its configuration says it",
        )
        .value_name("PATH"),
        text("plugin-state-dir", "The plugin's stateDir")
            .value_name("PATH")
            .default_value("/var/lib/inpod/plugin"),
        text("zds-socket", "The socket on which ztunnels connect")
            .value_name("PATH")
            .default_value("/var/run/ztunnel/ztunnel.sock"),
    ]
}

pub(super) fn doctor() -> Command {
    Command::new("doctor")
        .about("What is wrong with this node, each with a code and what to do about it")
        .args(places())
        .arg(flag(
            "self-test",
            "Have netconfig send traffic through real rules in two netns made for it; written down in its log",
        ))
        .arg(output().help("table, or json: an object with the list of checks"))
}

pub(super) fn bundle() -> Command {
    Command::new("bundle")
        .about(
            "Everything that is known of this node, without secrets, for somebody who is to help",
        )
        .args(places())
        .args([
            path(
                "output",
                "A file that ends in .tar, or a directory that is not there yet",
            )
            .short('o')
            .default_value("inpod-bundle.tar"),
            path(
                "log",
                "A log besides those of inpod's pods; may be repeated",
            )
            .action(clap::ArgAction::Append),
            flag(
                "redact-addresses",
                "Replace addresses, each by the same number everywhere",
            ),
        ])
}

fn mode(text: &str) -> Result<Mode, String> {
    let modes = [Mode::Uninstall, Mode::Handover];
    let named = modes.into_iter().find(|mode| mode.word() == text);
    named.ok_or_else(|| "it is not uninstall or handover".to_owned())
}

/// `90`, `90s`, `5m` or `1h`.
fn span(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("", 1)];
    let unit = units.iter().find(|(unit, _)| text.ends_with(unit));
    let (unit, seconds) = unit.copied().unwrap_or(("", 1));
    let number: Option<u32> = text.strip_suffix(unit).and_then(|it| it.parse().ok());
    match number {
        Some(number) if number > 0 => Ok(Duration::from_secs(u64::from(number) * seconds)),
        Some(_) | None => Err("it is no time such as 90s or 5m".to_owned()),
    }
}

pub(super) fn leave() -> Command {
    Command::new("leave")
        .about("Take inpod off every node that can be reached, and say which could not. Asks Kubernetes, with your rights")
        .args([
            Arg::new("mode").long("mode").value_name("MODE").value_parser(mode).required(true).help(
                "uninstall: withdraw all pods and revert what was done; handover: leave rules, listeners and annotations to another agent",
            ),
            text("namespace", "Where inpod is installed; else the namespace of the context").short('n'),
            text("daemonset", "The agent's DaemonSet, and the label app.kubernetes.io/name of its pods").default_value("inpod"),
            // Takes the place of the one that all commands have.
            Arg::new("timeout").long("timeout").value_name("TIME").value_parser(span).default_value("5m").help(
                "How long nodes are waited for, such as 90s or 5m",
            ),
            path("kubeconfig", "How the API server is reached; else as kubectl does, or as the pod's service account"),
        ])
}

fn shape(text: &str) -> Result<bool, String> {
    match text {
        "yaml" => Ok(false),
        "patch" => Ok(true),
        _ => Err("it is not yaml or patch".to_owned()),
    }
}

pub(super) fn inject() -> Command {
    Command::new("inject")
        .about("Print a manifest as the injector would make its pods; asks nobody, changes nothing")
        .args([
            path("file", "The manifest; - is standard input")
                .short('f')
                .required(true),
            path(
                "config",
                "The injector's configuration (inject.yaml of its ConfigMap); else its defaults",
            ),
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(shape)
                .default_value("yaml")
                .help("yaml, or patch: a line of JSON for each object"),
        ])
}

pub(super) fn inject_order(matches: &ArgMatches) -> InjectOrder {
    let path = |name| matches.get_one::<PathBuf>(name).cloned();
    InjectOrder {
        file: path("file").unwrap_or_default(),
        config: path("config"),
        is_patch: matches.get_one("output").copied().unwrap_or(false),
    }
}

fn string(matches: &ArgMatches, name: &str) -> Option<String> {
    matches.get_one::<String>(name).cloned()
}

fn host_root(matches: &ArgMatches) -> PathBuf {
    let root = matches.get_one::<PathBuf>("host-root").cloned();
    root.unwrap_or_else(|| "/".into())
}

pub(super) fn examination(matches: &ArgMatches) -> Examination {
    let run_dir = matches
        .get_one::<PathBuf>("run-dir")
        .cloned()
        .unwrap_or_default();
    Examination {
        root: Root::new(&host_root(matches)),
        places: Places {
            cni_conf_dir: string(matches, "cni-conf-dir"),
            cni_bin_dir: string(matches, "cni-bin-dir"),
            plugin_state_dir: string(matches, "plugin-state-dir").unwrap_or_default(),
            zds_socket: string(matches, "zds-socket").unwrap_or_default(),
            run_dir: run_dir.display().to_string(),
        },
        self_test: is_set(matches, "self-test"),
    }
}

fn is_set(matches: &ArgMatches, name: &str) -> bool {
    let known = matches.try_get_one::<bool>(name).ok().flatten();
    known.copied().unwrap_or(false)
}

pub(super) fn bundle_order(matches: &ArgMatches) -> BundleOrder {
    let logs = matches.get_many::<PathBuf>("log").into_iter().flatten();
    BundleOrder {
        examination: examination(matches),
        output: matches
            .get_one::<PathBuf>("output")
            .cloned()
            .unwrap_or_default(),
        redact_addresses: is_set(matches, "redact-addresses"),
        logs: logs.cloned().collect(),
    }
}

pub(super) fn leave_order(matches: &ArgMatches) -> LeaveOrder {
    LeaveOrder {
        mode: matches.get_one("mode").copied().unwrap_or(Mode::Handover),
        namespace: string(matches, "namespace"),
        daemonset: string(matches, "daemonset").unwrap_or_default(),
        patience: matches.get_one("timeout").copied().unwrap_or_default(),
        kubeconfig: matches.get_one::<PathBuf>("kubeconfig").cloned(),
    }
}

/// Where the sockets are from here: below the node's root, where one is given.
pub(super) fn run_dir(matches: &ArgMatches, run_dir: PathBuf) -> PathBuf {
    let Some(("doctor" | "bundle", rest)) = matches.subcommand() else {
        return run_dir;
    };
    if rest.value_source("host-root") == Some(ValueSource::CommandLine) {
        return Root::new(&host_root(rest)).at(Path::new(&run_dir));
    }
    run_dir
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::{
        super::{Arguments, Command, Format, Refused},
        *,
    };

    fn parse(line: &str) -> Result<Arguments, Refused> {
        Arguments::parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn a_node_is_looked_at_from_where_its_root_is() {
        let arguments = parse("inpod doctor --host-root /host --self-test -o json").unwrap();
        let Command::Doctor(examination, Format::Json) = arguments.command else {
            panic!("no doctor");
        };
        assert!(examination.self_test);
        assert_eq!(arguments.run_dir, PathBuf::from("/host/run/inpod"));
        assert_eq!(examination.places.run_dir, "/run/inpod");
        let here = parse("inpod doctor").unwrap();
        assert_eq!(here.run_dir, PathBuf::from("/run/inpod"));
    }

    #[test]
    fn leaving_has_to_say_how_and_may_say_how_long() {
        let line = "inpod leave --mode uninstall -n mesh --timeout 90s";
        let Command::Leave(order) = parse(line).unwrap().command else {
            panic!("no leave");
        };
        assert_eq!(
            (order.mode, order.patience),
            (Mode::Uninstall, Duration::from_secs(90))
        );
        assert_eq!(
            (order.namespace.as_deref(), order.daemonset.as_str()),
            (Some("mesh"), "inpod")
        );
        for line in [
            "inpod leave",
            "inpod leave --mode away",
            "inpod leave --mode handover --timeout 0m",
        ] {
            assert!(matches!(parse(line), Err(Refused::Usage(_))), "{line}");
        }
    }

    #[test]
    fn a_bundle_goes_where_it_is_told() {
        let Command::Bundle(order) =
            parse("inpod bundle -o /tmp/x --log /a --log /b --redact-addresses")
                .unwrap()
                .command
        else {
            panic!("no bundle");
        };
        assert_eq!(order.output, PathBuf::from("/tmp/x"));
        assert!(order.redact_addresses && order.logs.len() == 2);
    }
}
