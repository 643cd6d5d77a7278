//! Parses the command line of the kit.

use std::{path::PathBuf, time::Duration};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

#[derive(Debug)]
pub struct Options {
    pub peer: Peer,
    /// The path of the socket; if unset, a path in the directory of the run.
    pub socket: Option<PathBuf>,
    pub json: Option<PathBuf>,
    /// The names of the cases to run; all cases if empty.
    pub cases: Vec<String>,
    pub list: bool,
    /// Run the cases with waits of up to a minute, too.
    pub thorough: bool,
    /// The time limit for each expected event.
    pub deadline: Duration,
    pub storm: usize,
    /// The command line of the peer; empty if the peer is already running.
    pub command: Vec<String>,
}

#[derive(Debug)]
pub enum Peer {
    Ztunnel,
    Agent {
        /// The agent's timeout for an answer and for a hello.
        ack_timeout: Duration,
        /// The driver; unset if the user only wants the list of cases.
        driver: Option<DriverChoice>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverChoice {
    Inpod(PathBuf),
    Exec(String),
}

impl Options {
    pub fn parse(
        arguments: impl IntoIterator<Item = std::ffi::OsString>,
    ) -> Result<Self, clap::Error> {
        command()
            .try_get_matches_from(arguments)
            .map(|matches| Self::of(&matches))
    }

    fn of(matches: &ArgMatches) -> Self {
        match matches.subcommand() {
            Some(("agent", matches)) => Self::common(matches, agent(matches)),
            Some((_, matches)) => Self::common(matches, Peer::Ztunnel),
            None => Self::common(matches, Peer::Ztunnel),
        }
    }

    fn common(matches: &ArgMatches, peer: Peer) -> Self {
        let words = |name| {
            matches
                .get_many(name)
                .into_iter()
                .flatten()
                .cloned()
                .collect()
        };
        Self {
            peer,
            socket: matches.get_one("socket").cloned(),
            json: matches.get_one("json").cloned(),
            cases: words("case"),
            list: matches.get_flag("list"),
            thorough: matches!(matches.try_get_one("thorough"), Ok(Some(true))),
            deadline: seconds(matches, "patience"),
            storm: matches.get_one("storm").copied().unwrap_or(1),
            command: words("command"),
        }
    }
}

fn agent(matches: &ArgMatches) -> Peer {
    let inpod = matches.get_one("inpod").cloned().map(DriverChoice::Inpod);
    let exec = matches.get_one("driver").cloned().map(DriverChoice::Exec);
    Peer::Agent {
        ack_timeout: seconds(matches, "ack-timeout"),
        driver: inpod.or(exec),
    }
}

fn seconds(matches: &ArgMatches, name: &str) -> Duration {
    Duration::from_secs(matches.get_one(name).copied().unwrap_or(10))
}

const COMMAND: &str =
    "The peer's command line; {socket} and {dir} (a directory of the run's own) are replaced";

const ZTUNNEL: &str = "\
Profiles: control tests the protocol (the rules Z), data the listeners and the
connections of pods (the rules D). The report has a verdict per profile.

Stock ztunnel forwards only for pods in the state of the control plane, so the
kit writes its pods to {dir}/workloads.yaml:
  export PROXY_MODE=shared FAKE_CA=true XDS_ADDRESS= NODE_NAME=conformance
  zds-conformance ztunnel -- \\
    env LOCAL_XDS_PATH={dir}/workloads.yaml ztunnel proxy ztunnel";

fn command() -> Command {
    Command::new("zds-conformance")
        .term_width(80)
        .about("Shows whether a ztunnel, or an agent, keeps the contract of ZDS. Needs root: it makes network namespaces.")
        .version(env!("CARGO_PKG_VERSION"))
        .after_help("Exit code: 0 passed, 1 failed, 2 could not be run.")
        .subcommand_required(true)
        .subcommand(common(
            Command::new("ztunnel")
                .about("Plays the agent; each case starts the ztunnel, with INPOD_UDS set to the socket")
                .after_help(ZTUNNEL),
        ).arg(
            Arg::new("thorough")
                .long("thorough")
                .help("Also run the cases that wait: about three minutes for all")
                .action(ArgAction::SetTrue),
        ))
        .subcommand(
            common(Command::new("agent").about("Plays ztunnels; each case starts the agent where its command is given"))
                .arg(number("ack-timeout", "10", "How long the agent waits for an answer and for a hello, in seconds"))
                .arg(path("inpod", "DIR", "Drive inpod's broker with this run_dir, and serve netns/netns.sock there").conflicts_with("driver"))
                .arg(option("driver", "PROGRAM", "Drive the agent by a program, called as PROGRAM begin|seed|add|remove ...")),
        )
}

fn common(command: Command) -> Command {
    command
        .arg(path(
            "socket",
            "PATH",
            "The ZDS socket [default: in a directory of the run's own]",
        ))
        .arg(path("json", "FILE", "Write the run there, as JSON"))
        .arg(option("case", "NAME", "Run this case only; repeatable").action(ArgAction::Append))
        .arg(
            Arg::new("list")
                .long("list")
                .help("List the cases, with their profile and the rules that they test")
                .action(ArgAction::SetTrue),
        )
        .arg(number(
            "patience",
            "10",
            "How long anything may take that has to happen, in seconds",
        ))
        .arg(
            option("storm", "N", "How many pods make a storm")
                .value_parser(value_parser!(usize))
                .default_value("200"),
        )
        .arg(
            Arg::new("command")
                .value_name("CMD")
                .help(COMMAND)
                .num_args(0..)
                .last(true),
        )
}

fn option(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

fn path(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    option(name, value, help).value_parser(value_parser!(PathBuf))
}

fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    option(name, "N", help)
        .value_parser(value_parser!(u64).range(1..))
        .default_value(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        let all = std::iter::once(&"zds-conformance").chain(arguments);
        Options::parse(all.map(std::ffi::OsString::from))
    }

    #[test]
    fn a_ztunnels_command_line_is_taken_as_it_is() {
        let options = parse(&[
            "ztunnel",
            "--case",
            "storm",
            "--",
            "ztunnel",
            "proxy",
            "--x={socket}",
        ])
        .unwrap();
        assert_eq!(options.command, ["ztunnel", "proxy", "--x={socket}"]);
        assert_eq!(options.cases, ["storm"]);
        assert_eq!(options.deadline, Duration::from_secs(10));
    }

    #[test]
    fn an_agent_has_one_driver() {
        let options = parse(&["agent", "--inpod", "/run/inpod", "--ack-timeout", "2"]).unwrap();
        let Peer::Agent {
            ack_timeout,
            driver,
        } = options.peer
        else {
            panic!()
        };
        assert_eq!(ack_timeout, Duration::from_secs(2));
        assert_eq!(driver, Some(DriverChoice::Inpod("/run/inpod".into())));
        assert!(parse(&["agent", "--inpod", "/a", "--driver", "b"]).is_err());
    }
}
