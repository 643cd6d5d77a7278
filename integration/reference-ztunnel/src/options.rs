//! Parses the command line of the program.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueEnum, value_parser};

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

/// A misbehavior on purpose, to test agents and the conformance kit. The documentation of each fault is its help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Fault {
    /// Behave like stock ztunnel.
    #[default]
    #[value(skip)]
    None,
    /// Carry out each request, then answer after this delay.
    #[value(skip)]
    AckDelay(Duration),
    /// Drop each request without acting or answering.
    NeverAck,
    /// Start no proxy: every Add is refused, and its pod stays pending.
    NackAdds,
    /// Connect without sending a hello, and read nothing.
    Silent,
    /// Send a hello of version 2.
    WrongVersion,
    /// Send a hello with a field that no version has; agents must accept this hello.
    HelloWithUnknownField,
    /// Send an answer that no request asked for after each 100 ms of silence.
    Keepalive,
    /// Answer each request twice.
    AckTwice,
    /// Leave the fifth request unanswered.
    SwallowOneAck,
    /// Send a refusal after the answer to the next request.
    AcksOutOfOrder,
    /// Read at most 512 bytes of a request.
    SmallBuffer,
    /// Accept requests of up to 4096 bytes.
    LargeBuffer,
    /// Refuse requests with unknown fields.
    StrictFields,
    /// Acknowledge an Add without a descriptor.
    NoDescriptorAccepted,
    /// Acknowledge an Add without workload_info.
    NoInfoAccepted,
    /// Acknowledge a second SnapshotSent.
    SecondSnapshotAccepted,
    /// Acknowledge a Keep after SnapshotSent.
    KeepAfterSnapshotAccepted,
    /// Close the connection after a read error without an answer.
    SilentReadError,
    /// Stop every pod after a read error.
    ReadErrorStopsPods,
    /// End the process after a read error.
    ExitOnReadError,
    /// End the process at the Del of an unknown pod.
    ExitOnUnknownDel,
    /// Keep a copy of each netns open for ever.
    LeakFd,
    /// Keep a descriptor open for each refused request.
    LeakRefusedFd,
    /// Close the connection after a second without a request.
    Impatient,
    /// Close the connection after 8 seconds without a request.
    GivesUpOnSilence,
    /// End the process if the first connection fails.
    GivesUpEarly,
    /// Keep a connection open after its end, and never connect again.
    NoReconnect,
    /// Double the pauses between connections up to a minute.
    LongBackoff,
    /// Stop every pod when the connection to the agent ends.
    DisconnectStopsPods,
    /// Stop every pod after 5 seconds without an agent.
    StopsPodsLater,
    /// Stop unnamed pods with the first request of a snapshot.
    StopBeforeSnapshotSent,
    /// Keep the pods that a snapshot does not name.
    NeverStopTheUnnamed,
    /// Count the names of a broken snapshot for the next one.
    NamesOutliveTheConnection,
    /// Acknowledge a Keep, and stop its pod with the snapshot.
    KeepNothing,
    /// Acknowledge a Del, and keep the pod.
    DelIgnored,
    /// Keep a pod that is named and deleted in the same snapshot.
    DelInSnapshotIgnored,
    /// Ignore an Add after a Del of the same pod in the snapshot.
    DelInSnapshotSticks,
    /// Restart a pod that is added again with the same netns.
    RestartOnSameNetns,
    /// Keep the listeners of a pod in its former netns.
    StayInOldNetns,
    /// Acknowledge an Add before the listeners are open.
    AckBeforeListening,
    /// Acknowledge an Add whose listeners cannot be opened.
    AckStartFailures,
    /// Close the connection after a refusal.
    NackCloses,
    /// Answer no Add while a pod is pending.
    PendingBlocks,
    /// Keep the other listeners open when one cannot be opened.
    PendingHalfOpen,
    /// Retry pending pods of an earlier connection.
    PendingSurvives,
    /// Retry a pending pod after its Del.
    PendingSurvivesDel,
    /// Acknowledge the second Add of a pending pod without starting the pod.
    PendingAddIgnored,
    /// Open the listeners outside the pod.
    ListenersInOwnNetns,
    /// Open no listener on port 15008.
    TwoListeners,
    /// Set no mark on the listeners.
    UnmarkedListeners,
    /// Listen on 127.0.0.1 only.
    LoopbackOnly,
    /// Listen on IPv4 addresses only.
    V4Only,
    /// Listen on IPv6 addresses only.
    V6Only,
    /// Accept no connection.
    NeverAccepts,
    /// Do not share the ports of the listeners.
    NoReuseport,
    /// Set no mark on the sockets that connect to destinations.
    UnmarkedUpstreams,
    /// Connect to applications from the pod's own address.
    OwnSourceAddress,
    /// Take the address of the listener for the destination of a connection.
    IgnoresOriginalDestination,
    /// Forward direct connections to the listeners, too, which is a loop unless rules of the netns stop the second connection.
    ForwardsDirectConnections,
    /// Let the live connections of a deleted or moved pod go on.
    DelKeepsConnections,
    /// Keep the end of one direction from the other side.
    IgnoresHalfCloses,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(delay) = text.strip_prefix("ack-delay-ms=") {
            let delay = delay.parse().map_err(|error| format!("{error}"))?;
            return Ok(Self::AckDelay(Duration::from_millis(delay)));
        }
        let unknown = |_| "not a fault that --help lists".to_owned();
        <Self as ValueEnum>::from_str(text, false).map_err(unknown)
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

fn fault_help() -> String {
    let faults = Fault::value_variants().iter();
    let faults = faults.filter_map(ValueEnum::to_possible_value);
    let lines = faults.map(|fault| {
        let help = fault.get_help().map(ToString::to_string);
        format!("\n{}: {}", fault.get_name(), help.unwrap_or_default())
    });
    lines.fold(
        "Misbehave on purpose:\nack-delay-ms=N: Answer N ms late".to_owned(),
        |help, line| help + &line,
    )
}

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
                .help(fault_help())
                .value_parser(<Fault as FromStr>::from_str),
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
