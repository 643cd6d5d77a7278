//! The command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Arg, ArgAction, ArgGroup, ArgMatches, value_parser};
use inpod_proto::{podevents::v1::PodState, types::v1::PodSelector};

mod binds;
mod more;

pub(crate) use binds::BindsQuery;
pub(crate) use more::{BundleOrder, LeaveOrder, Mode};

use crate::{doctor::Examination, inject::InjectOrder, words};

/// What is printed for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// A table for people.
    Table,
    /// Protobuf's JSON mapping, for programs.
    Json,
}

/// Which pods, and how they are shown.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) namespace: Option<String>,
    pub(crate) states: Vec<PodState>,
    pub(crate) amiss: bool,
    pub(crate) let_through: bool,
    pub(crate) watch: bool,
    pub(crate) format: Format,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    Pods(Query),
    Explain(PodSelector, Format),
    Binds(BindsQuery),
    /// Without a pod: all.
    Resync(Option<PodSelector>, Format),
    Status,
    Doctor(Examination, Format),
    Bundle(BundleOrder),
    Leave(LeaveOrder),
    Inject(InjectOrder),
}

/// The command line, understood.
#[derive(Clone, Debug)]
pub(crate) struct Arguments {
    pub(crate) run_dir: PathBuf,
    pub(crate) timeout: Duration,
    pub(crate) command: Command,
}

/// A command line that asks for nothing, or for what there is not.
#[derive(Debug)]
pub(crate) enum Refused {
    Help(String),
    Usage(String),
}

const CODES: &str = "Exit codes:\n  0  done\n  1  a service answered with a failure, or is not ready (status); a check failed (doctor); a node has not left (leave); a manifest cannot be used (inject); a pod could not be looked into (binds)\n  \
                     2  this command line cannot be used\n  3  a service, or Kubernetes, could not be reached\n  4  enrollment would change something (binds)";

const STATES: [PodState; 5] = [
    PodState::Out,
    PodState::Enrolling,
    PodState::Enrolled,
    PodState::Withdrawing,
    PodState::Deleting,
];

fn state(text: &str) -> Result<PodState, String> {
    let named = STATES
        .into_iter()
        .find(|state| words::state(*state) == text);
    let names = STATES.map(words::state).join(", ");
    named.ok_or_else(|| format!("it is none of {names}"))
}

fn pod(text: &str) -> Result<PodSelector, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(PodSelector {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        }),
        Some(_) | None => Err("it is not NAMESPACE/NAME".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds.into())),
        Ok(_) | Err(_) => Err("it is no number of seconds, from 1".to_owned()),
    }
}

fn format(text: &str) -> Result<Format, String> {
    match text {
        "table" => Ok(Format::Table),
        "json" => Ok(Format::Json),
        _ => Err("it is not table or json".to_owned()),
    }
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .help(help)
        .action(ArgAction::SetTrue)
}

fn output() -> Arg {
    Arg::new("output")
        .short('o')
        .long("output")
        .value_name("FORMAT")
        .value_parser(format)
        .default_value("table")
        .help("table, or json: protobuf's JSON mapping of the answer")
}

fn named_pod() -> Arg {
    Arg::new("pod")
        .value_name("NAMESPACE/NAME")
        .value_parser(pod)
}

fn pods() -> clap::Command {
    clap::Command::new("pods")
        .about("The pods of this node, a line each")
        .args([
            Arg::new("namespace").short('n').long("namespace").value_name("NAMESPACE").help("Only of this namespace"),
            Arg::new("state")
                .long("state")
                .value_name("STATE")
                .value_parser(state)
                .action(ArgAction::Append)
                .help("Only those that stand there: out, enrolling, enrolled, withdrawing or deleting; may be repeated"),
            flag("amiss", "Only those that have a failure or were let through"),
            flag("let-through", "Only those that were let through without a decision"),
            flag("watch", "Go on with every change, until the service ends. JSON: an object in each line").short('w'),
            output(),
        ])
}

fn command() -> clap::Command {
    let explain = clap::Command::new("explain")
        .about("Why a pod is in the mesh or not, and everything that is known of it")
        .arg(named_pod().help("The pod"))
        .arg(
            Arg::new("uid")
                .long("uid")
                .value_name("UID")
                .help("The pod, by its UID"),
        )
        .group(ArgGroup::new("which").args(["pod", "uid"]).required(true))
        .arg(output());
    let resync = clap::Command::new("resync")
        .about("Have pods verified and mended now, and what waits attempted; written down in the log of pod-events")
        .arg(named_pod().help("Only this pod"))
        .arg(flag("all", "All pods of this node"))
        .group(ArgGroup::new("which").args(["pod", "all"]).required(true))
        .arg(output());
    let status = clap::Command::new("status")
        .about("Whether the services are ready, and what they depend on");
    clap::Command::new("inpod")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Which pods of this node are in the mesh, and why or why not. Asks the services' sockets; run it on the node, as root")
        .after_help(CODES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .arg(
            Arg::new("run-dir")
                .long("run-dir")
                .value_name("DIRECTORY")
                .value_parser(value_parser!(PathBuf))
                .default_value("/run/inpod")
                .global(true)
                .help("Where the services' sockets are"),
        )
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .value_name("SECONDS")
                .value_parser(seconds)
                .default_value("30")
                .global(true)
                .help("How long an answer may take"),
        )
        .subcommands([pods(), explain, binds::binds(), resync, status])
        .subcommands([more::doctor(), more::bundle(), more::leave(), more::inject()])
}

impl Arguments {
    /// Reads a command line, the program's name first.
    pub(crate) fn parse(command_line: impl Iterator<Item = OsString>) -> Result<Self, Refused> {
        let refused = |error: clap::Error| {
            let text = error.to_string();
            if error.use_stderr() {
                Refused::Usage(text)
            } else {
                Refused::Help(text)
            }
        };
        let matches = command()
            .try_get_matches_from(command_line)
            .map_err(refused)?;
        let given = |name: &str| matches.get_one::<PathBuf>(name).cloned();
        Ok(Self {
            run_dir: more::run_dir(&matches, given("run-dir").unwrap_or_default()),
            timeout: matches.get_one("timeout").copied().unwrap_or_default(),
            command: asked(&matches),
        })
    }
}

fn asked(matches: &ArgMatches) -> Command {
    match matches.subcommand() {
        Some(("pods", rest)) => Command::Pods(Query {
            namespace: rest.get_one("namespace").cloned(),
            states: rest
                .get_many("state")
                .into_iter()
                .flatten()
                .copied()
                .collect(),
            amiss: rest.get_flag("amiss"),
            let_through: rest.get_flag("let-through"),
            watch: rest.get_flag("watch"),
            format: format_of(rest),
        }),
        Some(("explain", rest)) => {
            let by_uid = || PodSelector {
                uid: rest.get_one("uid").cloned().unwrap_or_default(),
                ..PodSelector::default()
            };
            let pod = rest.get_one("pod").cloned().unwrap_or_else(by_uid);
            Command::Explain(pod, format_of(rest))
        }
        Some(("binds", rest)) => Command::Binds(binds::query(rest)),
        Some(("resync", rest)) => Command::Resync(rest.get_one("pod").cloned(), format_of(rest)),
        Some(("doctor", rest)) => Command::Doctor(more::examination(rest), format_of(rest)),
        Some(("bundle", rest)) => Command::Bundle(more::bundle_order(rest)),
        Some(("leave", rest)) => Command::Leave(more::leave_order(rest)),
        Some(("inject", rest)) => Command::Inject(more::inject_order(rest)),
        Some(_) | None => Command::Status,
    }
}

fn format_of(matches: &ArgMatches) -> Format {
    matches.get_one("output").copied().unwrap_or(Format::Table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, Refused> {
        Arguments::parse(line.split(' ').map(OsString::from))
    }

    fn refused(line: &str) -> String {
        match parse(line) {
            Err(Refused::Usage(text)) => text,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_query_says_which_pods() {
        let line = "inpod pods -n shop --amiss --state out --state enrolled -w -o json";
        let Command::Pods(query) = parse(line).unwrap().command else {
            panic!("{line}");
        };
        assert_eq!(query.namespace.as_deref(), Some("shop"));
        assert_eq!(query.states, [PodState::Out, PodState::Enrolled]);
        assert!(query.amiss && query.watch && !query.let_through);
        assert_eq!(query.format, Format::Json);
    }

    #[test]
    fn what_holds_for_every_command_may_stand_anywhere() {
        for line in [
            "inpod --run-dir /x --timeout 2 status",
            "inpod status --timeout 2 --run-dir /x",
        ] {
            let arguments = parse(line).unwrap();
            assert_eq!(arguments.run_dir, PathBuf::from("/x"), "{line}");
            assert_eq!(arguments.timeout, Duration::from_secs(2), "{line}");
        }
    }

    #[test]
    fn a_pod_is_named_or_given_by_its_uid_and_not_both() {
        let Command::Explain(pod, Format::Table) = parse("inpod explain shop/web").unwrap().command
        else {
            panic!("no explain");
        };
        assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("shop", "web"));
        let Command::Explain(pod, _) = parse("inpod explain --uid u1").unwrap().command else {
            panic!("no explain");
        };
        assert_eq!(pod.uid, "u1");
        refused("inpod explain");
        refused("inpod explain shop/web --uid u1");
    }

    #[test]
    fn all_pods_are_looked_at_only_where_that_is_said() {
        refused("inpod resync");
        refused("inpod resync shop/web --all");
        let all = parse("inpod resync --all").unwrap().command;
        assert!(matches!(all, Command::Resync(None, Format::Table)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, named) in [
            ("inpod explain web", "NAMESPACE/NAME"),
            ("inpod explain shop/", "NAMESPACE/NAME"),
            ("inpod pods --state gone", "out, enrolling, enrolled"),
            ("inpod pods -o yaml", "table or json"),
            ("inpod status --timeout 0", "from 1"),
            ("inpod pod", "pods"),
        ] {
            let text = refused(line);
            assert!(text.contains(named), "{line}: {text}");
        }
    }

    #[test]
    fn help_tells_the_exit_codes() {
        let Err(Refused::Help(text)) = parse("inpod --help") else {
            panic!("no help");
        };
        assert!(
            text.contains("3  a service, or Kubernetes, could not be reached"),
            "{text}"
        );
    }
}
