//! Display names of the contract's enums.

use inpod_proto::{
    podevents::v1::{PodState, ProofFact, ProofResult},
    types::v1::{Enrollment, Reason},
};

pub(crate) fn format_state(state: PodState) -> &'static str {
    match state {
        PodState::Unspecified => "unknown",
        PodState::Out => "out",
        PodState::Enrolling => "enrolling",
        PodState::Enrolled => "enrolled",
        PodState::Withdrawing => "withdrawing",
        PodState::Deleting => "deleting",
    }
}

pub(crate) fn format_fact(fact: ProofFact) -> &'static str {
    match fact {
        ProofFact::Unspecified => "unknown",
        ProofFact::Rules => "rules",
        ProofFact::Listeners => "listeners",
        ProofFact::Workload => "workload",
        ProofFact::Connections => "connections",
        ProofFact::Capabilities => "capabilities",
    }
}

pub(crate) fn format_result(result: ProofResult) -> &'static str {
    match result {
        ProofResult::Unspecified | ProofResult::Unknown => "unknown",
        ProofResult::Confirmed => "confirmed",
        ProofResult::Refuted => "refuted",
    }
}

pub(crate) fn format_enrollment(enrollment: Enrollment) -> &'static str {
    match enrollment {
        Enrollment::Unspecified | Enrollment::Unknown => "unknown",
        Enrollment::None => "none",
        Enrollment::Ambient => "ambient",
        Enrollment::Sidecar => "sidecar",
    }
}

/// Returns the name of a reason as in logs and Events, or the number of a reason that only a newer service knows.
pub(crate) fn reason(number: i32) -> String {
    let name = |reason: Reason| {
        let name = reason.as_str_name();
        name.strip_prefix("REASON_").unwrap_or(name).to_owned()
    };
    Reason::try_from(number).map_or_else(|_| number.to_string(), name)
}
