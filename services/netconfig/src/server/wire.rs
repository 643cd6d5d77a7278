//! Between messages and what they stand for.

mod redirection;

pub(super) use redirection::redirection_of;

use inpod_proto::{
    Invalid, addresses_to, into_status,
    netconfig::v1::{self, RemovePhase},
};
use tonic::Status;
use workload::Failure;

use crate::{
    apply::Phase,
    backend::Backend,
    claims::Claim,
    error::IntoFailure,
    inspect,
    selftest::{Check, Report},
};

pub(super) fn describe(claim: &Claim) -> v1::Claim {
    v1::Claim {
        sandbox: Some((&claim.sandbox).into()),
        netns: Some(claim.netns.id().into()),
        path: claim.netns.path().to_string_lossy().into_owned(),
        addresses: addresses_to(&claim.addresses),
        since: Some(claim.since.into()),
    }
}

pub(super) fn describe_process(process: inspect::Process) -> v1::Process {
    let inspect::Process {
        start_time,
        pid,
        command,
        sandbox_own,
    } = process;
    v1::Process {
        pid,
        start_time,
        command,
        sandbox_own,
    }
}

pub(super) fn describe_report(report: Report) -> v1::SelfTestResponse {
    let passed = report.checks.iter().all(|check| check.outcome.is_ok());
    let describe = |check: Check| v1::SelfTestCheck {
        name: check.name,
        passed: check.outcome.is_ok(),
        evidence: check.outcome.unwrap_or_else(|why| why),
    };
    v1::SelfTestResponse {
        backend: backend_of(report.backend).into(),
        passed,
        checks: report.checks.into_iter().map(describe).collect(),
        ..v1::SelfTestResponse::default()
    }
}

pub(super) fn backend_of(backend: Backend) -> v1::Backend {
    match backend {
        Backend::Nftables => v1::Backend::Nftables,
        Backend::IptablesNft => v1::Backend::IptablesNft,
        Backend::IptablesLegacy => v1::Backend::IptablesLegacy,
    }
}

pub(super) fn phase_of(phase: RemovePhase) -> Result<Phase, Status> {
    match phase {
        RemovePhase::Drain => Ok(Phase::Drain),
        RemovePhase::Final => Ok(Phase::Final),
        RemovePhase::Unspecified => Err(missing("phase")),
    }
}

pub(super) fn missing(field: &'static str) -> Status {
    invalid(Invalid::new(field, format!("{field} is required")))
}

pub(super) fn invalid(invalid: Invalid) -> Status {
    into_status(&Failure::from(invalid))
}

pub(super) fn refusal(error: impl IntoFailure) -> Status {
    into_status(&error.into_failure())
}
