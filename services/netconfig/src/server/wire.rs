//! Converts between protobuf and internal types.

mod redirection;

pub(super) use redirection::redirection_of;

use std::net::IpAddr;

use inpod_proto::{
    Invalid, addresses_from, addresses_to, into_status,
    netconfig::v1::{self, FindingKind, RemovePhase},
};
use inpod_types::{Failure, PodUid};
use tonic::Status;

use crate::{
    apply::Phase,
    claims::Claim,
    conflicts::{self, Kind},
    error::Failed,
    inspect,
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

pub(super) fn describe_found(claim: &Claim, process: inspect::Process) -> v1::FindNetnsResponse {
    v1::FindNetnsResponse {
        instance_id: String::new(),
        sandbox: Some((&claim.sandbox).into()),
        netns: Some(claim.netns.id().into()),
        path: claim.netns.path().to_string_lossy().into_owned(),
        process: Some(describe_process(process)),
        only_legacy_nat: false,
    }
}

pub(super) fn describe_listener(listener: &inspect::Listener) -> v1::Listener {
    let inspect::Listener {
        protocol,
        port,
        address,
        dual_stack,
        uid,
        interface_index,
        mark: _,
        inode: _,
        cookie: _,
        cgroup: _,
    } = *listener;
    let protocol = match protocol {
        inspect::Protocol::Tcp => v1::Protocol::Tcp,
        inspect::Protocol::Udp => v1::Protocol::Udp,
    };
    v1::Listener {
        protocol: protocol.into(),
        address: address.to_string(),
        port: port.into(),
        dual_stack,
        uid,
        interface_index: interface_index.unwrap_or(0),
    }
}

pub(super) fn describe_finding(finding: conflicts::Finding) -> v1::Finding {
    let conflicts::Finding {
        kind,
        subject,
        sentence,
    } = finding;
    let blocks = kind.blocks();
    let kind = match kind {
        Kind::NatChain => FindingKind::NatChain,
        Kind::DropPolicy | Kind::Drops => FindingKind::DropPolicy,
        Kind::Bridge => FindingKind::Bridge,
        Kind::MarkedRule => FindingKind::MarkedRule,
        Kind::RpFilter => FindingKind::RpFilter,
        Kind::LoopbackDown => FindingKind::LoopbackDown,
        Kind::Ipv6Disabled => FindingKind::Ipv6Disabled,
        Kind::Incumbent => FindingKind::Incumbent,
        Kind::LegacyNat => FindingKind::LegacyNat,
        Kind::ListenerMissing => FindingKind::ListenerMissing,
        Kind::ListenerTaken => FindingKind::ListenerTaken,
        Kind::MarkedConnection => FindingKind::MarkedConnection,
        Kind::MarkingChain => FindingKind::MarkingChain,
    };
    v1::Finding {
        kind: kind.into(),
        subject,
        sentence,
        blocks,
    }
}

pub(super) fn pod_of(request: &v1::FindNetnsRequest) -> Result<(PodUid, Vec<IpAddr>), Status> {
    let uid = request.pod_uid.parse();
    let uid = uid.map_err(|error| refuse(Invalid::new("pod_uid", error)))?;
    let addresses = addresses_from(&request.addresses, "addresses").map_err(refuse)?;
    if addresses.is_empty() {
        return Err(missing("addresses"));
    }
    Ok((uid, addresses))
}

pub(super) fn phase_of(phase: RemovePhase) -> Result<Phase, Status> {
    match phase {
        RemovePhase::Drain => Ok(Phase::Drain),
        RemovePhase::Final => Ok(Phase::Final),
        RemovePhase::Unspecified => Err(missing("phase")),
    }
}

pub(super) fn missing(field: &'static str) -> Status {
    refuse(Invalid::new(field, format!("{field} is required")))
}

pub(super) fn refuse(invalid: Invalid) -> Status {
    into_status(&Failure::from(invalid))
}

pub(super) fn to_status(error: Failed) -> Status {
    into_status(&error.into())
}
