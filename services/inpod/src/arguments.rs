use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Arg, ArgAction, ArgGroup, ArgMatches, value_parser};
use clap_complete::Shell;
use inpod_proto::types::v1::PodSelector;

mod binds;
mod bundle;
mod doctor;
mod inject;
mod pods;
mod uninstall;

pub(crate) use binds::BindsQuery;
pub(crate) use bundle::BundleOptions;
pub(crate) use pods::PodQuery;
pub(crate) use uninstall::{Mode, UninstallOptions};

use crate::{doctor::DoctorOptions, inject::InjectOptions};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Tables for people, whose layout may change between releases.
    Table,
    /// The table of pods with more columns; other tables are the same.
    Wide,
    /// The response in protobuf's JSON mapping, whose stability is part of the contract.
    Json,
    /// The JSON mapping, written as YAML.
    Yaml,
}

#[derive(Clone, Debug)]
pub(crate) enum Command {
    Pods(PodQuery),
    Explain(PodSelector, Format),
    Binds(BindsQuery),
    /// Resyncs all pods of the node if no pod is selected.
    Resync(Option<PodSelector>, Format),
    Status,
    Doctor(DoctorOptions, Format),
    Bundle(BundleOptions),
    Uninstall(UninstallOptions),
    Inject(InjectOptions),
    /// Prints the completion script of a shell.
    Completion(String),
}

#[derive(Clone, Debug)]
pub(crate) struct Arguments {
    pub(crate) run_dir: PathBuf,
    pub(crate) timeout: Duration,
    pub(crate) command: Command,
}

#[derive(Debug)]
pub(crate) enum ParseError {
    /// Requested help or version, printed with exit code 0.
    Help(String),
    /// The description of a wrong command line, printed with exit code 2.
    Usage(String),
}

const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  a service answered with a failure or is not ready (status), a check failed
     (doctor), a node did not finish in time (uninstall, handover), a manifest
     cannot be used (inject), or a pod could not be inspected (binds)
  2  the command line is wrong
  3  a service or Kubernetes could not be reached
  4  enrollment would change who can reach a port (binds)";

fn pod(text: &str) -> Result<PodSelector, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(PodSelector {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        }),
        Some(_) | None => Err("expected NAMESPACE/NAME".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds.into())),
        Ok(_) | Err(_) => Err("expected a number of seconds, at least 1".to_owned()),
    }
}

fn format(text: &str) -> Result<Format, String> {
    match text {
        "table" => Ok(Format::Table),
        "wide" => Ok(Format::Wide),
        "json" => Ok(Format::Json),
        "yaml" => Ok(Format::Yaml),
        _ => Err("expected table, wide, json or yaml".to_owned()),
    }
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .help(help)
        .action(ArgAction::SetTrue)
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

fn output() -> Arg {
    Arg::new("output")
        .short('o')
        .long("output")
        .value_name("FORMAT")
        .value_parser(format)
        .default_value("table")
        .help("table, wide (more columns of pods), or json or yaml: the response in protobuf's JSON mapping")
}

fn named_pod() -> Arg {
    Arg::new("pod")
        .value_name("NAMESPACE/NAME")
        .value_parser(pod)
}

fn command() -> clap::Command {
    let explain = clap::Command::new("explain")
        .about("Explain why a pod is in the mesh or not, with everything known about it")
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
        .about(
            "Re-verify pods now, repair drift and retry pending work. pod-events logs the request",
        )
        .arg(named_pod().help("Only this pod"))
        .arg(flag("all", "All pods of this node"))
        .group(ArgGroup::new("which").args(["pod", "all"]).required(true))
        .arg(output());
    let status = clap::Command::new("status")
        .about("Show whether the services are ready, and their conditions");
    let shell = Arg::new("shell").value_parser(value_parser!(Shell));
    let completion = clap::Command::new("completion")
        .about("Print the completion script of a shell: source <(inpod completion bash)")
        .arg(shell.required(true));
    clap::Command::new("inpod")
        .version(inpod_types::VERSION)
        .about("Shows which pods of this node are in the mesh and why, diagnoses the node, and removes inpod from a cluster. Talks to the services over their sockets: run it on the node, as root")
        .after_help(EXIT_CODES)
        .next_line_help(true)
        .term_width(80)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .arg(
            Arg::new("run-dir")
                .long("run-dir")
                .value_name("DIRECTORY")
                .value_parser(value_parser!(PathBuf))
                .default_value("/run/inpod")
                .global(true)
                .help("Directory of the services' sockets"),
        )
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .value_name("SECONDS")
                .value_parser(seconds)
                .default_value("30")
                .global(true)
                .help("How long a service may take to answer"),
        )
        .subcommands([pods::command(), explain, binds::command(), resync, status])
        .subcommands([doctor::command(), bundle::command(), inject::command()])
        .subcommands([uninstall::uninstall(), uninstall::handover(), completion])
}

impl Arguments {
    pub(crate) fn parse(command_line: impl Iterator<Item = OsString>) -> Result<Self, ParseError> {
        let refused = |error: clap::Error| {
            let text = error.to_string();
            if error.use_stderr() {
                ParseError::Usage(text)
            } else {
                ParseError::Help(text)
            }
        };
        let matches = command()
            .try_get_matches_from(command_line)
            .map_err(refused)?;
        let given = |name: &str| matches.get_one::<PathBuf>(name).cloned();
        Ok(Self {
            run_dir: doctor::run_dir(&matches, given("run-dir").unwrap_or_default()),
            timeout: matches.get_one("timeout").copied().unwrap_or_default(),
            command: parse_command(&matches),
        })
    }
}

fn parse_command(matches: &ArgMatches) -> Command {
    match matches.subcommand() {
        Some(("pods", rest)) => Command::Pods(pods::query(rest)),
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
        Some(("doctor", rest)) => Command::Doctor(doctor::options(rest), format_of(rest)),
        Some(("bundle", rest)) => Command::Bundle(bundle::options(rest)),
        Some(("uninstall", rest)) => Command::Uninstall(uninstall::options(Mode::Uninstall, rest)),
        Some(("handover", rest)) => Command::Uninstall(uninstall::options(Mode::Handover, rest)),
        Some(("inject", rest)) => Command::Inject(inject::options(rest)),
        Some(("completion", rest)) => Command::Completion(completion_script(rest)),
        Some(_) | None => Command::Status,
    }
}

fn completion_script(matches: &ArgMatches) -> String {
    let mut script = Vec::new();
    if let Some(shell) = matches.get_one::<Shell>("shell").copied() {
        clap_complete::generate(shell, &mut command(), "inpod", &mut script);
    }
    String::from_utf8_lossy(&script).into_owned()
}

fn format_of(matches: &ArgMatches) -> Format {
    matches.get_one("output").copied().unwrap_or(Format::Table)
}

fn string(matches: &ArgMatches, name: &str) -> Option<String> {
    matches.get_one::<String>(name).cloned()
}

fn is_set(matches: &ArgMatches, name: &str) -> bool {
    let known = matches.try_get_one::<bool>(name).ok().flatten();
    known.copied().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn parse(line: &str) -> Result<Arguments, ParseError> {
        Arguments::parse(line.split(' ').map(OsString::from))
    }

    fn refused(line: &str) -> String {
        match parse(line) {
            Err(ParseError::Usage(text)) => text,
            other => panic!("{line}: {other:?}"),
        }
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
    fn all_pods_are_resynced_only_with_the_flag() {
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
            ("inpod pods -o xml", "table, wide, json or yaml"),
            ("inpod status --timeout 0", "at least 1"),
            ("inpod pod", "pods"),
        ] {
            let text = refused(line);
            assert!(text.contains(named), "{line}: {text}");
        }
    }

    fn help_of(line: &str) -> String {
        match parse(line) {
            Err(ParseError::Help(text)) => text,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn help_fits_80_columns() {
        let names = command();
        let names = names.get_subcommands().map(|it| it.get_name().to_owned());
        let lines = names.map(|name| format!("inpod {name} --help"));
        for line in lines.chain(["inpod --help".to_owned(), "inpod -V".to_owned()]) {
            let text = help_of(&line);
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(80), "{text}");
        }
    }
}
