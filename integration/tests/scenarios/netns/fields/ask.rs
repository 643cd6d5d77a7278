//! Sends any message that a descriptor describes, and finds its fields.

use inpod_proto::failure_of;
use integration::Node;
use prost_reflect::{DynamicMessage, FieldDescriptor, ReflectMessage as _, Value};
use tonic::{Code, Status};

#[derive(Clone)]
pub(crate) struct Good {
    pub(crate) component: &'static str,
    pub(crate) method: &'static str,
    pub(crate) message: DynamicMessage,
}

pub(crate) struct Asker {
    pub(crate) node: Node,
}

impl Asker {
    pub(crate) fn ask(&self, good: &Good, message: DynamicMessage) -> Result<(), Status> {
        let socket = inpod_service::socket(&self.node.run_dir(), good.component);
        let package = message.descriptor().package_name().to_owned();
        let service = match good.component {
            "pod-events" => "PodEventsService",
            "netconfig" => "NetconfigService",
            _ => "ZtunnelBrokerService",
        };
        let path = format!("/{package}.{service}/{}", good.method);
        integration::call(&socket, &path, message)
    }

    /// Expects one of these codes and the field's name.
    pub(crate) fn refused(
        &self,
        good: &Good,
        message: DynamicMessage,
        what: &str,
        codes: &[Code],
        field: &str,
    ) -> Vec<String> {
        let Err(status) = self.ask(good, message) else {
            return vec![format!("{} {what}: accepted", good.method)];
        };
        let failure = failure_of(&status);
        // The service names a list item's index.
        let reported = failure.field.replace("[0]", "");
        let named =
            field.is_empty() || field.starts_with(reported.as_str()) && !reported.is_empty();
        let named = named || reported.starts_with(field);
        if codes.contains(&status.code()) && named {
            return Vec::new();
        }
        vec![format!(
            "{} {what}: {:?} at {:?}: {}",
            good.method,
            status.code(),
            failure.field,
            status.message()
        )]
    }
}

pub(crate) fn comment(field: &FieldDescriptor) -> String {
    let file = field.parent_file();
    let info = file
        .file_descriptor_proto()
        .source_code_info
        .clone()
        .unwrap();
    let found = info
        .location
        .iter()
        .find(|location| location.path == field.path());
    found
        .map(|location| location.leading_comments().trim().to_owned())
        .unwrap_or_default()
}

/// Returns every set field as a path, parents first.
pub(crate) fn fields(message: &DynamicMessage) -> Vec<Vec<FieldDescriptor>> {
    let mut found = Vec::new();
    for (field, value) in message.fields() {
        found.push(vec![field.clone()]);
        let first = value.as_list().and_then(|items| items.first());
        let inner = value
            .as_message()
            .or_else(|| first.and_then(Value::as_message));
        for mut rest in inner.map(fields).unwrap_or_default() {
            rest.insert(0, field.clone());
            found.push(rest);
        }
    }
    found
}

pub(crate) fn name(path: &[FieldDescriptor]) -> String {
    let names: Vec<_> = path.iter().map(FieldDescriptor::name).collect();
    names.join(".")
}

/// Changes the field at a path's end.
pub(crate) fn changed(
    message: &DynamicMessage,
    path: &[FieldDescriptor],
    change: &dyn Fn(&mut DynamicMessage, &FieldDescriptor),
) -> DynamicMessage {
    let mut message = message.clone();
    match path {
        [] => {}
        [last] => change(&mut message, last),
        [first, rest @ ..] => {
            let inner =
                |value: &Value| value.as_message().map(|inner| changed(inner, rest, change));
            let held = message.get_field(first).into_owned();
            let value = match held.as_list() {
                Some(items) => {
                    let items = items.iter().filter_map(inner).map(Value::Message);
                    Value::List(items.collect())
                }
                None => Value::Message(inner(&held).unwrap()),
            };
            message.set_field(first, value);
        }
    }
    message
}
