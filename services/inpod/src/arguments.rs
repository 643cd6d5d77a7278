use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{ArgGroup, Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use inpod_proto::types::v1::PodSelector;

mod binds;
mod bundle;
mod doctor;
mod log_level;
mod pods;
mod uninstall;

pub(crate) use binds::BindsQuery;
pub(crate) use bundle::BundleOptions;
pub(crate) use doctor::{DoctorOptions, HostOptions};
pub(crate) use log_level::{LogLevelOptions, LoggingService};
pub(crate) use pods::{PodFilter, PodQuery};
pub(crate) use uninstall::UninstallOptions;

const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  a service answered with a failure or is not ready (status), a check failed
     (doctor), a node did not finish in time (uninstall, handover), or a pod
     could not be inspected (binds)
  2  the command line is wrong
  3  a service or Kubernetes could not be reached, or a file with objects of
     Kubernetes cannot be used (binds, explain)
  4  enrollment would change who can reach a port (binds)";

/// Shows which pods of this node are in the mesh and why, diagnoses the node, and removes inpod from a cluster. Talks
/// to the services over their sockets: run it on the node, as root.
#[derive(Debug, Parser)]
#[command(version = inpod_types::VERSION, after_help = EXIT_CODES, next_line_help = true, term_width = 80)]
pub(crate) struct Arguments {
    /// Directory of the services' sockets.
    #[arg(
        long,
        value_name = "DIRECTORY",
        default_value = "/run/inpod",
        global = true
    )]
    pub(crate) run_dir: PathBuf,
    #[arg(help = "How long a service may take to answer", long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "30", global = true)]
    pub(crate) timeout: Duration,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the pods of this node.
    Pods(PodQuery),
    /// Explain why a pod is in the mesh or not, with everything known about it.
    Explain(ExplainOptions),
    /// List what the applications of this node's pods listen on, and what enrollment changes about who can reach them.
    Binds(BindsQuery),
    /// Re-verify pods now, repair drift and retry pending work. pod-events logs the request.
    Resync(ResyncOptions),
    /// Show what the services of this node log, or have a service log more for a time. The service logs the request.
    LogLevel(LogLevelOptions),
    /// Show whether the services are ready, and their conditions.
    Status,
    /// Diagnose this node: list every problem with its code and how to fix it.
    Doctor(DoctorOptions),
    /// Pack what inpod's services answer on this node, with their metrics, into one file to attach to a bug report.
    Bundle(BundleOptions),
    /// Remove inpod from every node: withdraw all pods and revert every change to the host. Uses your Kubernetes
    /// credentials; run it before helm uninstall.
    Uninstall(UninstallOptions),
    /// Remove inpod from every node but keep rules, listeners and annotations for the agent that replaces it. Uses your
    /// Kubernetes credentials.
    Handover(UninstallOptions),
    /// Print the completion script of a shell: source <(inpod completion bash).
    Completion {
        #[arg(value_name = "shell")]
        shell: Shell,
    },
}

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("which").required(true))]
pub(crate) struct ExplainOptions {
    /// The pod.
    #[arg(value_name = "NAMESPACE/NAME", value_parser = parse_pod, group = "which")]
    pod: Option<PodSelector>,
    /// The pod, by its UID.
    #[arg(long, value_name = "UID", group = "which")]
    uid: Option<String>,
    /// File with the pod and the network policies of the namespace: the output of kubectl get pods,networkpolicies -o
    /// json. - is standard input. kubectl inpod reads both for you.
    #[arg(long, value_name = "FILE")]
    pub(crate) network_policies: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl ExplainOptions {
    pub(crate) fn selector(&self) -> PodSelector {
        let by_uid = || PodSelector {
            uid: self.uid.clone().unwrap_or_default(),
            ..PodSelector::default()
        };
        self.pod.clone().unwrap_or_else(by_uid)
    }
}

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("which").required(true))]
pub(crate) struct ResyncOptions {
    /// Only this pod.
    #[arg(value_name = "NAMESPACE/NAME", value_parser = parse_pod, group = "which")]
    pub(crate) pod: Option<PodSelector>,
    /// All pods of this node.
    #[arg(long, group = "which")]
    all: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Output {
    /// table, wide (more columns of pods), or json or yaml: the response in protobuf's JSON mapping.
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        hide_possible_values = true
    )]
    pub(crate) format: Format,
}

// clap would add doc comments of the variants to the completion scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    // Tables for people, whose layout may change between releases.
    Table,
    // The table of pods with more columns; other tables are the same.
    Wide,
    // The response in protobuf's JSON mapping, whose stability is part of the contract.
    Json,
    // The JSON mapping, written as YAML.
    Yaml,
}

impl Arguments {
    pub(crate) fn from_command_line(
        command_line: impl Iterator<Item = OsString>,
    ) -> Result<Self, clap::Error> {
        let mut arguments = Self::try_parse_from(command_line)?;
        if let Command::Doctor(DoctorOptions { host, .. })
        | Command::Bundle(BundleOptions { host, .. }) = &mut arguments.command
        {
            host.run_dir = arguments.run_dir.display().to_string();
            arguments.run_dir = host.root().at(&arguments.run_dir);
        }
        Ok(arguments)
    }
}

pub(crate) fn completion_script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "inpod", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

fn parse_pod(text: &str) -> Result<PodSelector, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(PodSelector {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        }),
        Some(_) | None => Err("expected NAMESPACE/NAME".to_owned()),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds.into())),
        Ok(_) | Err(_) => Err("expected a number of seconds, at least 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::from_command_line(line.split(' ').map(OsString::from))
    }

    fn refused(line: &str) -> String {
        match parse(line) {
            Err(error) if error.use_stderr() => error.to_string(),
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
        let explain = |line| {
            let Command::Explain(options) = parse(line).unwrap().command else {
                panic!("{line}");
            };
            options.selector()
        };
        let pod = explain("inpod explain shop/web");
        assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("shop", "web"));
        assert_eq!(explain("inpod explain --uid u1").uid, "u1");
        refused("inpod explain");
        refused("inpod explain shop/web --uid u1");
    }

    #[test]
    fn all_pods_are_resynced_only_with_the_flag() {
        refused("inpod resync");
        refused("inpod resync shop/web --all");
        let Command::Resync(all) = parse("inpod resync --all").unwrap().command else {
            panic!("no resync");
        };
        assert_eq!((all.pod, all.output.format), (None, Format::Table));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, named) in [
            ("inpod explain web", "NAMESPACE/NAME"),
            ("inpod explain shop/", "NAMESPACE/NAME"),
            ("inpod pods --state gone", "out, enrolling, enrolled"),
            ("inpod pods -o xml", "table, wide, json, yaml"),
            ("inpod status --timeout 0", "at least 1"),
            ("inpod pod", "pods"),
        ] {
            let text = refused(line);
            assert!(text.contains(named), "{line}: {text}");
        }
    }

    fn help_of(line: &str) -> String {
        match parse(line) {
            Err(error) if !error.use_stderr() => error.to_string(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn help_fits_80_columns() {
        let names = Arguments::command();
        let names = names.get_subcommands().map(|it| it.get_name().to_owned());
        let lines = names.map(|name| format!("inpod {name} --help"));
        for line in lines.chain(["inpod --help".to_owned(), "inpod -V".to_owned()]) {
            let text = help_of(&line);
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(80), "{text}");
        }
    }
}
