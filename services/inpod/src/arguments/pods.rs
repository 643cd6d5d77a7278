//! Arguments of `pods`, and the filters that `binds` shares with `pods`.

use clap::{Arg, ArgAction, ArgMatches, Command};
use inpod_proto::podevents::v1::PodState;

use super::{Format, flag, format_of, output};
use crate::display;

#[derive(Clone, Debug)]
pub(crate) struct PodQuery {
    pub(crate) namespace: Option<String>,
    pub(crate) states: Vec<PodState>,
    pub(crate) unhealthy: bool,
    pub(crate) admitted_unenrolled: bool,
    pub(crate) watch: bool,
    pub(crate) format: Format,
}

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
        .find(|state| display::format_state(*state) == text);
    let names = STATES.map(display::format_state).join(", ");
    named.ok_or_else(|| format!("expected one of {names}"))
}

pub(super) fn filters() -> [Arg; 4] {
    [
        Arg::new("namespace")
            .short('n')
            .long("namespace")
            .value_name("NAMESPACE")
            .help("Only pods of this namespace"),
        Arg::new("state")
            .long("state")
            .value_name("STATE")
            .value_parser(state)
            .action(ArgAction::Append)
            .help("Only pods in this state: out, enrolling, enrolled, withdrawing or deleting; may be repeated"),
        flag(
            "unhealthy",
            "Only pods that have a failure or were admitted unenrolled",
        ),
        flag(
            "admitted-unenrolled",
            "Only pods that started without enrollment although they may belong to the mesh",
        ),
    ]
}

pub(super) fn states(matches: &ArgMatches) -> Vec<PodState> {
    let states = matches.get_many("state").into_iter().flatten();
    states.copied().collect()
}

pub(super) fn command() -> Command {
    Command::new("pods")
        .about("List the pods of this node")
        .args(filters())
        .args([
            flag(
                "watch",
                "Print every change until the service ends; as JSON, one object per line",
            )
            .short('w'),
            output(),
        ])
}

pub(super) fn query(matches: &ArgMatches) -> PodQuery {
    PodQuery {
        namespace: matches.get_one("namespace").cloned(),
        states: states(matches),
        unhealthy: matches.get_flag("unhealthy"),
        admitted_unenrolled: matches.get_flag("admitted-unenrolled"),
        watch: matches.get_flag("watch"),
        format: format_of(matches),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, tests::parse},
        *,
    };

    fn parsed(line: &str) -> PodQuery {
        let Command::Pods(query) = parse(line).unwrap().command else {
            panic!("{line}");
        };
        query
    }

    #[test]
    fn a_query_selects_pods() {
        let query =
            parsed("inpod pods -n shop --unhealthy --state out --state enrolled -w -o json");
        assert_eq!(query.namespace.as_deref(), Some("shop"));
        assert_eq!(query.states, [PodState::Out, PodState::Enrolled]);
        assert!(query.unhealthy && query.watch && !query.admitted_unenrolled);
        assert_eq!(query.format, Format::Json);
    }
}
