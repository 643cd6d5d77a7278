//! Every call of every service, with each required field missing, each text malformed or too long, each enumeration
//! unknown. The contracts are the table: a comment beginning with "Required" makes a field required, and every
//! refusal names the field.

mod ask;
mod table;

use integration::{Node, Spec, State};
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, ReflectMessage as _, Value};
use tonic::Code;

use crate::netns::fields::ask::{Asker, Good, changed, comment, fields, name};

/// Afterwards nothing may have changed.
fn each(check: impl Fn(&Asker, &Good) -> Vec<String>) {
    let node = Node::running().unwrap();
    let inside = node.pod(Spec::new("inside").ambient()).unwrap();
    let fresh = node.sandbox(Spec::new("fresh").ambient()).unwrap();
    let table = table::table(&node, &inside, &fresh);
    let before = State::of(&node, &[&inside, &fresh]).unwrap();
    let asker = Asker { node };
    let wrong: Vec<_> = table.iter().flat_map(|good| check(&asker, good)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    before.unchanged(&asker.node, &[&inside, &fresh]).unwrap();
    asker.node.until_whole(&inside.spec).unwrap();
}

/// Returns whether the absence of a required field equals a value: 0 is a valid device number, of another netns than
/// the claimed one, and discovered sandboxes have no network.
fn is_valid_if_absent(field: &str) -> bool {
    field.ends_with("netns.device") || field.ends_with("network_name")
}

#[test]
fn every_required_field_is_demanded_by_its_name() {
    each(|asker, good| {
        if asks_of_all(good) {
            return Vec::new();
        }
        let required = fields(&good.message).into_iter().filter(|path| {
            path.last().is_some_and(|field| {
                comment(field).starts_with("Required")
                    || field
                        .containing_oneof()
                        .is_some_and(|it| !it.is_synthetic())
            })
        });
        let mut wrong = Vec::new();
        let mut count = 0;
        for path in required {
            let field = name(&path);
            count += 1;
            if !is_valid_if_absent(&field) {
                let message = changed(&good.message, &path, &|message, field| {
                    message.clear_field(field);
                });
                let named = oneof(&path).unwrap_or_else(|| field.clone());
                wrong.extend(asker.refused(
                    good,
                    message,
                    &format!("without {field}"),
                    &[Code::InvalidArgument],
                    &named,
                ));
            }
        }
        if count == 0 {
            wrong.push(format!("{}: no required field found", good.method));
        }
        wrong
    });
}

#[test]
fn an_empty_request_is_refused_by_the_name_of_a_field() {
    each(|asker, good| {
        if asks_of_all(good) {
            return Vec::new();
        }
        let empty = DynamicMessage::new(good.message.descriptor());
        asker.refused(good, empty, "empty", &[Code::InvalidArgument], "")
    });
}

/// Without a selection a call means all pods.
fn asks_of_all(good: &Good) -> bool {
    matches!(
        good.method,
        "ListPods" | "WatchEnrollments" | "ListBinds" | "Resync"
    )
}

/// A missing choice is reported as its oneof.
fn oneof(path: &[FieldDescriptor]) -> Option<String> {
    let (last, parents) = path.split_last()?;
    let choice = last.containing_oneof().filter(|it| !it.is_synthetic())?;
    let parents = parents.iter().map(FieldDescriptor::name);
    let names: Vec<_> = parents.chain([choice.name()]).collect();
    Some(names.join("."))
}

fn set(value: &str) -> impl Fn(&mut DynamicMessage, &FieldDescriptor) {
    move |message, field| {
        let value = Value::String(value.to_owned());
        message.set_field(
            field,
            if field.is_list() {
                Value::List(vec![value])
            } else {
                value
            },
        );
    }
}

#[test]
fn every_text_that_is_malformed_is_refused_by_its_field() {
    each(|asker, good| {
        let mut wrong = Vec::new();
        for path in fields(&good.message) {
            let field = name(&path);
            if path.last().unwrap().kind() != Kind::String {
                continue;
            }
            let (codes, named) = match field.as_str() {
                "instance_id" => (&[Code::Aborted][..], ""),
                _ => (&[Code::InvalidArgument][..], field.as_str()),
            };
            // An interface may have almost any name.
            let legal = field.ends_with("ifname").then_some("-");
            let values = ["a/../b", "a b", "a\nb", "a\0b", "-", "ü\u{202e}"];
            for value in values.into_iter().filter(|value| Some(*value) != legal) {
                let message = changed(&good.message, &path, &set(value));
                wrong.extend(asker.refused(
                    good,
                    message,
                    &format!("{field} = {value:?}"),
                    codes,
                    named,
                ));
            }
            let long = "x".repeat(60_000);
            let message = changed(&good.message, &path, &set(&long));
            wrong.extend(asker.refused(good, message, &format!("a long {field}"), codes, named));
        }
        wrong
    });
}

#[test]
fn a_request_of_five_megabytes_is_refused_before_it_is_read() {
    each(|asker, good| {
        let strings = fields(&good.message)
            .into_iter()
            .filter(|path| path.last().unwrap().kind() == Kind::String);
        let path = strings.take(1).next().unwrap();
        let message = changed(&good.message, &path, &set(&"x".repeat(5 << 20)));
        asker.refused(
            good,
            message,
            "of 5 MB",
            &[Code::OutOfRange, Code::ResourceExhausted],
            "",
        )
    });
}

#[test]
fn an_unknown_phase_another_run_and_an_old_revision_are_refused() {
    each(|asker, good| {
        let with = |field: &str, value: Value| {
            let mut message = good.message.clone();
            message.set_field_by_name(field, value);
            message
        };
        let old = |message: &DynamicMessage| {
            let mut message = message.clone();
            if let Some(Value::Message(workload)) = message.get_field_by_name_mut("workload") {
                workload.set_field_by_name("revision", Value::U64(1));
            }
            message
        };
        match good.method {
            "RemoveRules" => {
                let refused = |number| {
                    asker.refused(
                        good,
                        with("phase", Value::EnumNumber(number)),
                        "phase",
                        &[Code::InvalidArgument],
                        "phase",
                    )
                };
                [0, 3, 99, -1].into_iter().flat_map(refused).collect()
            }
            "RemoveWorkload" => {
                let mut wrong = asker.refused(
                    good,
                    with("revision", Value::U64(1)),
                    "old",
                    &[Code::Aborted],
                    "",
                );
                wrong.extend(asker.refused(
                    good,
                    with("instance_id", Value::String("another".into())),
                    "another run",
                    &[Code::Aborted],
                    "",
                ));
                wrong
            }
            "AddWorkload" => asker.refused(good, old(&good.message), "old", &[Code::Aborted], ""),
            "SetWorkloads" => asker.refused(
                good,
                with("instance_id", Value::String("another".into())),
                "another run",
                &[Code::Aborted],
                "",
            ),
            _ => Vec::new(),
        }
    });
}
