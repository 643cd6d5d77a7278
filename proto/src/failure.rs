use std::time::Duration;

use inpod_types::{Failure, Reason};
use prost::Message as _;
use tonic::{Code, Status};

use crate::types::v1;

const TYPE_URL: &str = "type.googleapis.com/inpod.types.v1.Failure";

/// Returns the gRPC code of a reason. No other function maps reasons to codes.
pub fn code_of(reason: Reason) -> Code {
    Code::from_i32(reason.code())
}

/// Converts a failure to a status that carries the failure in the details (`google.rpc.Status`).
pub fn into_status(failure: &Failure) -> Status {
    let code = code_of(failure.reason);
    let details = tonic_types::pb::Status {
        code: code.into(),
        message: failure.message.clone(),
        details: vec![prost_types::Any {
            type_url: TYPE_URL.to_owned(),
            value: v1::Failure::from(failure).encode_to_vec(),
        }],
    };
    Status::with_details(code, &failure.message, details.encode_to_vec().into())
}

/// Returns the failure in the details of a status. A status without details, such as a transport error or a deadline
/// of the library, is converted by its code.
pub fn failure_of(status: &Status) -> Failure {
    carried(status).unwrap_or_else(|| Failure::new(reason_of(status.code()), status.message()))
}

fn carried(status: &Status) -> Option<Failure> {
    let details = tonic_types::pb::Status::decode(status.details()).ok()?;
    let any = details
        .details
        .iter()
        .find(|any| any.type_url == TYPE_URL)?;
    let wire = v1::Failure::decode(any.value.as_slice()).ok()?;
    let retry_after = wire
        .retry_after
        .and_then(|wait| Duration::try_from(wait).ok());
    Some(Failure {
        // A newer peer may use reasons that this release does not know.
        reason: Reason::from_number(wire.reason).unwrap_or_else(|| reason_of(status.code())),
        field: wire.field,
        message: status.message().to_owned(),
        retry_after,
        undo_failures: wire.undo_failures,
    })
}

fn reason_of(code: Code) -> Reason {
    match code {
        Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Reason::InvalidField,
        Code::PermissionDenied | Code::Unauthenticated => Reason::CallerRefused,
        Code::NotFound => Reason::SandboxUnknown,
        Code::FailedPrecondition => Reason::ClaimUnknown,
        Code::Aborted => Reason::InstanceMismatch,
        Code::ResourceExhausted => Reason::Overloaded,
        Code::DeadlineExceeded | Code::Cancelled => Reason::DeadlineExceeded,
        Code::Unavailable | Code::Unknown => Reason::DependencyUnavailable,
        Code::Ok | Code::AlreadyExists | Code::Internal | Code::DataLoss => Reason::Internal,
    }
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            reason: failure.reason.number(),
            field: failure.field.clone(),
            remedy: failure.reason.remedy().to_owned(),
            retry_after: failure.retry_after.and_then(|wait| wait.try_into().ok()),
            undo_failures: failure.undo_failures.clone(),
            // The status already has the message.
            message: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_survives_the_way_through_a_status() {
        let failure = Failure {
            undo_failures: vec!["rules were left".into()],
            ..Failure::new(Reason::ZtunnelLost, "ztunnel was lost 3 s ago")
                .at_field("workload")
                .retry_after(Duration::from_secs(15))
        };
        let status = into_status(&failure);
        assert_eq!(
            (status.code(), failure_of(&status)),
            (Code::Unavailable, failure)
        );
    }

    #[test]
    fn every_reason_arrives_as_itself_under_a_code_that_means_it_with_what_helps() {
        for reason in Reason::ALL {
            let status = into_status(&Failure::new(*reason, "it did not work"));
            assert_eq!(failure_of(&status).reason, *reason);
            assert!(
                !matches!(status.code(), Code::Ok | Code::Unknown),
                "{reason}"
            );
            let wire = v1::Failure::from(&Failure::new(*reason, ""));
            assert_ne!(wire.reason(), v1::Reason::Unspecified, "{reason}");
            assert!(!wire.remedy.is_empty(), "{reason}");
        }
    }

    /// Returns the comment of a reason, at the path `[5, e, 2, v]` of the descriptor.
    fn comment_of(reason: Reason) -> String {
        let set = prost_types::FileDescriptorSet::decode(crate::DESCRIPTORS).unwrap();
        let is_file = |file: &&prost_types::FileDescriptorProto| file.package() == "inpod.types.v1";
        let file = set.file.iter().find(is_file).unwrap();
        let is_reason = |it: &prost_types::EnumDescriptorProto| it.name() == "Reason";
        let e = file.enum_type.iter().position(is_reason).unwrap();
        let is_value = |it: &prost_types::EnumValueDescriptorProto| it.number() == reason.number();
        let v = file.enum_type[e].value.iter().position(is_value).unwrap();
        let path = [5, e, 2, v].map(|it| i32::try_from(it).unwrap());
        let locations = &file.source_code_info.as_ref().unwrap().location;
        let location = locations.iter().find(|it| it.path == path).unwrap();
        location.leading_comments().replace('\n', "")
    }

    #[test]
    fn the_contract_has_the_remedy_of_each_reason_as_the_code_does() {
        for reason in Reason::ALL {
            let comment = comment_of(*reason);
            assert!(comment.ends_with(reason.remedy()), "{reason}: {comment}");
        }
    }

    #[test]
    fn a_status_of_any_code_that_carries_no_failure_has_a_reason_all_the_same() {
        for code in (1..17).map(Code::from_i32) {
            let failure = failure_of(&Status::new(code, "no"));
            assert_ne!(failure.reason.number(), 0, "{code:?}");
        }
    }

    #[test]
    fn a_status_of_the_transport_becomes_an_unavailable_dependency() {
        let failure = failure_of(&Status::unavailable("tcp connect error"));
        assert_eq!(failure.reason, Reason::DependencyUnavailable);
        assert_eq!(failure.message, "tcp connect error");
    }

    #[test]
    fn a_reason_of_a_newer_peer_is_read_by_its_code() {
        let wire = v1::Failure {
            reason: 9999,
            ..v1::Failure::default()
        };
        let any = prost_types::Any {
            type_url: TYPE_URL.into(),
            value: wire.encode_to_vec(),
        };
        let details = tonic_types::pb::Status {
            details: vec![any],
            ..Default::default()
        };
        let status =
            Status::with_details(Code::PermissionDenied, "no", details.encode_to_vec().into());
        assert_eq!(failure_of(&status).reason, Reason::CallerRefused);
    }
}
