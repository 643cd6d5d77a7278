//! Arguments of `pods`, and the filter that `binds` shares with `pods`.

use clap::Args;
use inpod_proto::{podevents::v1::PodState, types::v1::PodSelector};

use super::Output;
use crate::display;

#[derive(Args, Clone, Debug)]
pub(crate) struct PodQuery {
    #[command(flatten)]
    pub(crate) filter: PodFilter,
    /// Print every change until the service ends; as JSON, one object per line.
    #[arg(short, long)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PodFilter {
    /// Only pods of this namespace.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Only pods in this state: out, enrolling, enrolled, withdrawing or deleting; may be repeated.
    #[arg(long = "state", value_name = "STATE", value_parser = parse_state)]
    pub(crate) states: Vec<PodState>,
    /// Only pods that have a failure or were admitted unenrolled.
    #[arg(long)]
    pub(crate) unhealthy: bool,
    /// Only pods that started without enrollment although they may belong to the mesh.
    #[arg(long)]
    pub(crate) admitted_unenrolled: bool,
}

impl PodFilter {
    pub(crate) fn selector(&self) -> Option<PodSelector> {
        let namespace = self.namespace.clone()?;
        Some(PodSelector {
            namespace,
            ..PodSelector::default()
        })
    }
}

const STATES: [PodState; 5] = [
    PodState::Out,
    PodState::Enrolling,
    PodState::Enrolled,
    PodState::Withdrawing,
    PodState::Deleting,
];

fn parse_state(text: &str) -> Result<PodState, String> {
    let named = STATES
        .into_iter()
        .find(|state| display::format_state(*state) == text);
    let names = STATES.map(display::format_state).join(", ");
    named.ok_or_else(|| format!("expected one of {names}"))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, Format, tests::parse},
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
        let filter = query.filter;
        assert_eq!(filter.namespace.as_deref(), Some("shop"));
        assert_eq!(filter.states, [PodState::Out, PodState::Enrolled]);
        assert!(filter.unhealthy && query.watch && !filter.admitted_unenrolled);
        assert_eq!(query.output.format, Format::Json);
    }
}
