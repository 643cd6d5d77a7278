//! Conversions between messages and the checked types of [`inpod_types`].

use std::{fmt::Display, str::FromStr};

use inpod_types::{Enrollment, Failure, NetnsId, NetnsRef, PodRef, Reason, Revision, SandboxRef};

use crate::{types::v1, ztunnelbroker::v1 as broker};

/// The error for an invalid field of a message, with the field's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Invalid {
    field: String,
    message: String,
}

impl Invalid {
    /// Creates the error for a field with a description of the problem.
    pub fn new(field: impl Into<String>, message: impl Display) -> Self {
        Self {
            field: field.into(),
            message: message.to_string(),
        }
    }

    /// Returns the field's name, as a path from the request.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Prefixes the field's path with the name of the enclosing message.
    #[must_use]
    pub fn within(self, parent: &str) -> Self {
        Self {
            field: format!("{parent}.{}", self.field),
            ..self
        }
    }
}

impl From<Invalid> for Failure {
    fn from(invalid: Invalid) -> Self {
        Self::new(Reason::InvalidField, invalid.message).at_field(invalid.field)
    }
}

/// Converts the message in a required field. The error names the field.
///
/// # Errors
///
/// If the message is absent, or if one of its fields is invalid.
pub fn required<M, T>(field: &'static str, message: Option<M>) -> Result<T, Invalid>
where
    T: TryFrom<M, Error = Invalid>,
{
    let message = message.ok_or_else(|| Invalid::new(field, format!("{field} is required")))?;
    T::try_from(message).map_err(|invalid| invalid.within(field))
}

fn text<T>(field: &'static str, value: &str) -> Result<T, Invalid>
where
    T: FromStr<Err: Display>,
{
    value.parse().map_err(|error| Invalid::new(field, error))
}

impl TryFrom<v1::PodRef> for PodRef {
    type Error = Invalid;

    fn try_from(pod: v1::PodRef) -> Result<Self, Invalid> {
        Ok(Self {
            namespace: text("namespace", &pod.namespace)?,
            name: text("name", &pod.name)?,
            uid: text("uid", &pod.uid)?,
        })
    }
}

impl From<&PodRef> for v1::PodRef {
    fn from(pod: &PodRef) -> Self {
        Self {
            namespace: pod.namespace.to_string(),
            name: pod.name.to_string(),
            uid: pod.uid.to_string(),
        }
    }
}

impl TryFrom<v1::SandboxRef> for SandboxRef {
    type Error = Invalid;

    fn try_from(sandbox: v1::SandboxRef) -> Result<Self, Invalid> {
        Ok(Self {
            network_name: text("network_name", &sandbox.network_name)?,
            container_id: text("container_id", &sandbox.container_id)?,
            ifname: text("ifname", &sandbox.ifname)?,
        })
    }
}

impl From<&SandboxRef> for v1::SandboxRef {
    fn from(sandbox: &SandboxRef) -> Self {
        Self {
            network_name: sandbox.network_name.to_string(),
            container_id: sandbox.container_id.to_string(),
            ifname: sandbox.ifname.to_string(),
        }
    }
}

impl TryFrom<v1::NetnsRef> for NetnsRef {
    type Error = Invalid;

    fn try_from(netns: v1::NetnsRef) -> Result<Self, Invalid> {
        let plain = netns.path.starts_with('/') && !netns.path.contains('\0');
        if !plain || netns.path.len() > 4096 {
            let message = "expected an absolute path of at most 4096 bytes";
            return Err(Invalid::new("path", message));
        }
        Ok(Self {
            path: netns.path.into(),
            device: netns.device,
            inode: netns.inode,
            cookie: netns.cookie,
        })
    }
}

impl From<&NetnsRef> for v1::NetnsRef {
    fn from(netns: &NetnsRef) -> Self {
        Self {
            path: netns.path.to_string_lossy().into_owned(),
            device: netns.device,
            inode: netns.inode,
            cookie: netns.cookie,
        }
    }
}

impl TryFrom<v1::NetnsId> for NetnsId {
    type Error = Invalid;

    fn try_from(id: v1::NetnsId) -> Result<Self, Invalid> {
        // Only inode and cookie show that a field is absent: 0 is a valid device number.
        for (field, value) in [("inode", id.inode), ("cookie", id.cookie)] {
            if value == 0 {
                let message = "device, inode and cookie are required";
                return Err(Invalid::new(field, message));
            }
        }
        Ok(Self {
            device: id.device,
            inode: id.inode,
            cookie: id.cookie,
        })
    }
}

impl From<NetnsId> for v1::NetnsId {
    fn from(id: NetnsId) -> Self {
        Self {
            device: id.device,
            inode: id.inode,
            cookie: id.cookie,
        }
    }
}

impl TryFrom<v1::WorkloadInfo> for inpod_types::WorkloadInfo {
    type Error = Invalid;

    fn try_from(info: v1::WorkloadInfo) -> Result<Self, Invalid> {
        Ok(Self {
            name: text("name", &info.name)?,
            namespace: text("namespace", &info.namespace)?,
            service_account: text("service_account", &info.service_account)?,
        })
    }
}

impl From<&inpod_types::WorkloadInfo> for v1::WorkloadInfo {
    fn from(info: &inpod_types::WorkloadInfo) -> Self {
        Self {
            name: info.name.to_string(),
            namespace: info.namespace.to_string(),
            service_account: info.service_account.to_string(),
        }
    }
}

impl TryFrom<broker::Workload> for inpod_types::Workload {
    type Error = Invalid;

    fn try_from(workload: broker::Workload) -> Result<Self, Invalid> {
        if workload.revision == 0 {
            return Err(Invalid::new("revision", "revision is required, from 1"));
        }
        let netns = workload.netns.map(NetnsId::try_from).transpose();
        Ok(Self {
            sandbox: required("sandbox", workload.sandbox)?,
            uid: text("uid", &workload.uid)?,
            info: required("info", workload.info)?,
            netns: netns.map_err(|invalid| invalid.within("netns"))?,
            revision: Revision(workload.revision),
        })
    }
}

impl From<&inpod_types::Workload> for broker::Workload {
    fn from(workload: &inpod_types::Workload) -> Self {
        Self {
            sandbox: Some((&workload.sandbox).into()),
            uid: workload.uid.to_string(),
            info: Some((&workload.info).into()),
            netns: workload.netns.map(Into::into),
            revision: workload.revision.0,
        }
    }
}

impl From<Enrollment> for v1::Enrollment {
    fn from(enrollment: Enrollment) -> Self {
        match enrollment {
            Enrollment::None => Self::None,
            Enrollment::Ambient => Self::Ambient,
            Enrollment::Sidecar => Self::Sidecar,
            Enrollment::Unknown => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox() -> v1::SandboxRef {
        v1::SandboxRef {
            network_name: "net".into(),
            container_id: "c1".into(),
            ifname: "eth0".into(),
        }
    }

    #[test]
    fn an_absent_message_names_its_field() {
        let error = required::<v1::SandboxRef, SandboxRef>("sandbox", None).unwrap_err();
        assert_eq!(
            (error.field(), error.to_string().as_str()),
            ("sandbox", "sandbox is required")
        );
    }

    #[test]
    fn an_invalid_inner_field_is_named_by_its_path() {
        let message = v1::SandboxRef {
            ifname: "eth 0".into(),
            ..sandbox()
        };
        let error = required::<_, SandboxRef>("sandbox", Some(message)).unwrap_err();
        assert_eq!(error.field(), "sandbox.ifname");
    }

    #[test]
    fn a_sandbox_survives_the_round_trip() {
        let checked = SandboxRef::try_from(sandbox()).unwrap();
        assert_eq!(v1::SandboxRef::from(&checked), sandbox());
    }

    #[test]
    fn a_relative_netns_path_is_refused() {
        let netns = v1::NetnsRef {
            path: "run/netns/a".into(),
            ..v1::NetnsRef::default()
        };
        assert_eq!(NetnsRef::try_from(netns).unwrap_err().field(), "path");
    }

    #[test]
    fn a_workload_without_revision_is_refused() {
        let workload = broker::Workload {
            sandbox: Some(sandbox()),
            ..broker::Workload::default()
        };
        assert_eq!(
            inpod_types::Workload::try_from(workload)
                .unwrap_err()
                .field(),
            "revision"
        );
    }

    #[test]
    fn every_reason_has_the_same_number_and_name_in_the_contract() {
        for reason in Reason::ALL {
            let wire = v1::Reason::try_from(reason.number()).unwrap();
            assert_eq!(wire.as_str_name(), format!("REASON_{}", reason.name()));
        }
        let wire = (1..1000)
            .filter(|n| v1::Reason::try_from(*n).is_ok())
            .count();
        assert_eq!(wire, Reason::ALL.len());
    }
}
