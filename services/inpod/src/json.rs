//! Renders messages in protobuf's JSON mapping: as JSON, like grpcurl does, or as YAML.

use std::sync::LazyLock;

use inpod_proto::DESCRIPTORS;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde::Serialize;

use crate::{arguments::Format, error::CommandError};

static POOL: LazyLock<Result<DescriptorPool, String>> =
    LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).map_err(|error| error.to_string()));

/// Finds the descriptor of a message; names without a package belong to pod-events.
fn described(message: &impl Message, name: &str) -> Result<DynamicMessage, CommandError> {
    let pool = POOL
        .as_ref()
        .map_err(|error| CommandError::Json(error.clone()))?;
    let name = match name.contains('.') {
        true => name.to_owned(),
        false => format!("inpod.podevents.v1.{name}"),
    };
    let unknown = || CommandError::Json(format!("no descriptor of {name}"));
    let descriptor = pool.get_message_by_name(&name).ok_or_else(unknown)?;
    let bytes = message.encode_to_vec();
    let odd = |error: prost::DecodeError| CommandError::Json(error.to_string());
    DynamicMessage::decode(descriptor, bytes.as_slice()).map_err(odd)
}

pub(crate) fn pretty(message: &impl Message, name: &str) -> Result<String, CommandError> {
    let message = described(message, name)?;
    serde_json::to_string_pretty(&message).map_err(|error| CommandError::Json(error.to_string()))
}

pub(crate) fn yaml(value: &impl Serialize) -> Result<String, CommandError> {
    let text = serde_saphyr::to_string(value);
    text.map_err(|error| CommandError::Json(error.to_string()))
}

/// Returns `None` if the format is a table, which each command renders in its own way.
pub(crate) fn structured(
    format: Format,
    message: &impl Message,
    name: &str,
) -> Result<Option<String>, CommandError> {
    match format {
        Format::Table | Format::Wide => Ok(None),
        Format::Json => pretty(message, name).map(Some),
        Format::Yaml => yaml(&described(message, name)?).map(Some),
    }
}

pub(crate) fn line(message: &impl Message, name: &str) -> Result<String, CommandError> {
    let message = described(message, name)?;
    serde_json::to_string(&message).map_err(|error| CommandError::Json(error.to_string()))
}

#[cfg(test)]
mod tests {
    use inpod_proto::{podevents::v1 as wire, types::v1 as types};

    use super::*;

    #[test]
    fn a_message_is_written_with_the_names_of_its_contract() {
        let summary = wire::PodSummary {
            state: wire::PodState::Enrolled.into(),
            desired: types::Enrollment::Ambient.into(),
            since: Some(prost_types::Timestamp {
                seconds: 86_400,
                nanos: 0,
            }),
            let_through: true,
            ..wire::PodSummary::default()
        };
        assert_eq!(
            line(&summary, "PodSummary").unwrap(),
            r#"{"desired":"ENROLLMENT_AMBIENT","state":"POD_STATE_ENROLLED","letThrough":true,"since":"1970-01-02T00:00:00Z"}"#
        );
    }
}
