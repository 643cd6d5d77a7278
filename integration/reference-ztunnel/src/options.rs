//! Parses the command line of the program.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

#[derive(Debug, Clone)]
pub struct Options {
    pub uds: PathBuf,
    /// The path of the access log; standard output if unset.
    pub access_log: Option<PathBuf>,
    /// The directory of the CA; without a CA, all traffic is plaintext.
    pub ca: Option<PathBuf>,
    /// The path of the state file; if unset, no state file is written.
    pub status: Option<PathBuf>,
    /// The time that live connections have after SIGTERM.
    pub termination_deadline: Duration,
    pub fault: Fault,
    pub dns: bool,
}

/// A misbehavior that every agent must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// Behave like stock ztunnel.
    #[default]
    None,
    /// Receive requests without acting or answering.
    NeverAck,
    /// Start no proxy: every Add is refused, and its pod stays pending.
    NackAdds,
    /// Carry out each request, then answer after this delay.
    AckDelay(Duration),
    /// Connect without sending a hello, and read nothing.
    Silent,
    /// Set no mark on the sockets that connect to destinations.
    UnmarkedUpstreams,
    /// Connect to applications from the pod's own address.
    OwnSourceAddress,
    /// Take the address of the listener for the destination of a connection.
    IgnoresOriginalDestination,
    /// Forward direct connections to the listeners, too: a loop, unless rules of the netns stop the second connection.
    ForwardsDirectConnections,
    /// Let the live connections of a deleted or moved pod go on.
    DelKeepsConnections,
    /// Stop every pod when the connection to the agent ends.
    DisconnectStopsPods,
    /// Keep the end of one direction from the other side.
    IgnoresHalfCloses,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=').unwrap_or((text, "")) {
            ("never-ack", "") => Ok(Self::NeverAck),
            ("nack-adds", "") => Ok(Self::NackAdds),
            ("silent", "") => Ok(Self::Silent),
            ("unmarked-upstreams", "") => Ok(Self::UnmarkedUpstreams),
            ("own-source-address", "") => Ok(Self::OwnSourceAddress),
            ("ignores-original-destination", "") => Ok(Self::IgnoresOriginalDestination),
            ("forwards-direct-connections", "") => Ok(Self::ForwardsDirectConnections),
            ("del-keeps-connections", "") => Ok(Self::DelKeepsConnections),
            ("disconnect-stops-pods", "") => Ok(Self::DisconnectStopsPods),
            ("ignores-half-closes", "") => Ok(Self::IgnoresHalfCloses),
            ("ack-delay-ms", delay) => {
                let delay = delay.parse().map_err(|error| format!("{error}"))?;
                Ok(Self::AckDelay(Duration::from_millis(delay)))
            }
            _ => Err("not a fault that --help lists".to_owned()),
        }
    }
}

impl Options {
    /// Parses the command line, and exits if the command line is wrong.
    #[must_use]
    pub fn parse() -> Self {
        Self::from_matches(&command().get_matches())
    }

    fn from_matches(matches: &ArgMatches) -> Self {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let seconds = matches.get_one("termination-deadline-seconds").copied();
        Self {
            uds: path("uds").unwrap_or_default(),
            access_log: path("access-log"),
            ca: path("ca"),
            status: path("status"),
            termination_deadline: Duration::from_secs(seconds.unwrap_or_default()),
            fault: matches.get_one("fault").copied().unwrap_or_default(),
            dns: matches.get_flag("dns"),
        }
    }
}

const FAULT_HELP: &str = "Misbehave on purpose: \
    never-ack (drop each request, answer none), \
    nack-adds (start no proxy, refuse each Add), \
    ack-delay-ms=N (answer N ms late), \
    silent (connect and never say hello), \
    unmarked-upstreams (set no mark on connections to destinations), \
    own-source-address (connect to applications from the pod's address), \
    ignores-original-destination (connect to the listener's own address), \
    forwards-direct-connections (forward what nothing redirected), \
    del-keeps-connections (let connections outlive their pod), \
    disconnect-stops-pods (stop every pod when the agent disconnects), \
    ignores-half-closes (keep the end of one direction from the other side)";

fn command() -> Command {
    Command::new("reference-ztunnel")
        .term_width(80)
        .about("A ztunnel that behaves like the stock one on ZDS")
        .version(env!("CARGO_PKG_VERSION"))
        .arg(
            path("uds", "The agent's ZDS socket")
                .env("INPOD_UDS")
                .default_value("/var/run/ztunnel/ztunnel.sock"),
        )
        .arg(path(
            "access-log",
            "Append a JSON line per connection event to this file [default: standard output]",
        ))
        .arg(path(
            "ca",
            "Speak HBONE between the pods of this process, with identities from the CA in this directory, \
             which is made if it is missing [default: plaintext]",
        ))
        .arg(path("status", "Keep the state in this file, as JSON"))
        .arg(
            Arg::new("termination-deadline-seconds")
                .long("termination-deadline-seconds")
                .value_name("N")
                .help("How long live connections may go on after SIGTERM")
                .value_parser(value_parser!(u64))
                .default_value("5"),
        )
        .arg(
            Arg::new("fault")
                .long("fault")
                .value_name("FAULT")
                .help(FAULT_HELP)
                .value_parser(Fault::from_str),
        )
        .arg(
            Arg::new("dns")
                .long("dns")
                .help("Listen for DNS, and answer each query with SERVFAIL")
                .action(ArgAction::SetTrue),
        )
}

fn path(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name("PATH")
        .help(help)
        .value_parser(value_parser!(PathBuf))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &[&str]) -> Result<Options, clap::Error> {
        let arguments = std::iter::once(&"reference-ztunnel").chain(arguments);
        command()
            .try_get_matches_from(arguments)
            .map(|matches| Options::from_matches(&matches))
    }

    #[test]
    fn the_defaults_are_the_stock_ztunnels() {
        let options = options(&[]).expect("parse");
        assert_eq!(options.termination_deadline, Duration::from_secs(5));
        assert_eq!(options.fault, Fault::None);
        assert!(options.access_log.is_none() && !options.dns);
    }

    #[test]
    fn every_fault_has_a_name() {
        let fault = |name| options(&["--fault", name]).map(|options| options.fault);
        assert_eq!(fault("never-ack").expect("parse"), Fault::NeverAck);
        assert_eq!(fault("nack-adds").expect("parse"), Fault::NackAdds);
        assert_eq!(fault("silent").expect("parse"), Fault::Silent);
        assert_eq!(
            fault("ack-delay-ms=250").expect("parse"),
            Fault::AckDelay(Duration::from_millis(250))
        );
        assert_eq!(
            fault("del-keeps-connections").expect("parse"),
            Fault::DelKeepsConnections
        );
        assert!(fault("ack-delay-ms").is_err());
        assert!(fault("melt").is_err());
    }
}
