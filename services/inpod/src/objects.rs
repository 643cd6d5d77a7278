//! Reads Kubernetes objects from a file, because the client has no rights of its own on Kubernetes.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::de::DeserializeOwned;
use serde_json::{Deserializer, Value};

/// Bounds the client's memory: `kubectl inpod` runs the client within the memory limit of pod-events' container.
const MAX_BYTES: u64 = 16 << 20;

/// Reads objects from a file, or from standard input if the path is `-`.
pub(crate) fn read(path: &Path) -> Result<Vec<Value>, String> {
    let text = if path == Path::new("-") {
        read_bounded(io::stdin().lock())
    } else {
        File::open(path).and_then(read_bounded)
    };
    parse(&text.map_err(|error| error.to_string())?)
}

fn read_bounded(input: impl Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let length = input.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if u64::try_from(length).is_ok_and(|length| length > MAX_BYTES) {
        let message = format!("more than {} MiB; choose one namespace", MAX_BYTES >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}

/// Parses what `kubectl get -o json` prints, once or several times: objects and lists of objects. An empty text is an
/// error, because kubectl prints an empty list if there are no objects.
fn parse(text: &[u8]) -> Result<Vec<Value>, String> {
    let mut documents = Deserializer::from_slice(text).into_iter().peekable();
    if documents.peek().is_none() {
        return Err("it is empty".to_owned());
    }
    let mut objects = Vec::new();
    for document in documents {
        let mut document: Value = document.map_err(|error| error.to_string())?;
        match document.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => objects.extend(items),
            Some(_) => return Err("items: expected a list".to_owned()),
            None => objects.push(document),
        }
    }
    Ok(objects)
}

pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let value = object.pointer(pointer).and_then(Value::as_str);
    value.unwrap_or_default()
}

/// Parses the field at a JSON pointer. The error names the object and the field.
pub(crate) fn field<T: DeserializeOwned + Default>(
    object: &Value,
    pointer: &str,
) -> Result<T, String> {
    match object.pointer(pointer) {
        None | Some(Value::Null) => Ok(T::default()),
        Some(value) => T::deserialize(value).map_err(|error| describe(object, pointer, &error)),
    }
}

/// Describes a problem of a field, for example `EndpointSlice shop/web-x: ports: invalid type ...`.
pub(crate) fn describe(object: &Value, pointer: &str, problem: &dyn std::fmt::Display) -> String {
    let part = |pointer| text(object, pointer);
    let (kind, namespace, name) = (
        part("/kind"),
        part("/metadata/namespace"),
        part("/metadata/name"),
    );
    let field = pointer.trim_start_matches('/').replace('/', ".");
    format!("{kind} {namespace}/{name}: {field}: {problem}")
}

pub(crate) fn labels(object: &Value) -> Result<BTreeMap<String, String>, String> {
    field(object, "/metadata/labels")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_and_lists_follow_each_other() {
        let input = br#"{"kind": "Pod"} {"kind": "List", "items": [{"kind": "A"}, {"kind": "B"}]}
            {"kind": "List", "items": []}"#;
        let kinds: Vec<_> = parse(input).unwrap();
        let kinds: Vec<_> = kinds.iter().map(|object| text(object, "/kind")).collect();
        assert_eq!(kinds, ["Pod", "A", "B"]);
    }

    #[test]
    fn unusable_input_is_described() {
        for (input, problem) in [
            ("", "it is empty"),
            (" \n", "it is empty"),
            ("{\"items\": [{}", "EOF while parsing a list at line 1"),
            ("{\"items\": 3}", "items: expected a list"),
            ("NAME  READY", "expected value at line 1"),
        ] {
            let error = parse(input.as_bytes()).unwrap_err();
            assert!(error.starts_with(problem), "{input}: {error}");
        }
        let huge = read_bounded(io::repeat(b' ')).unwrap_err().to_string();
        assert_eq!(huge, "more than 16 MiB; choose one namespace");
        assert!(read_bounded(io::repeat(b' ').take(MAX_BYTES)).is_ok());
    }

    #[test]
    fn errors_name_the_object_and_the_field() {
        let object =
            json!({"kind": "X", "metadata": {"namespace": "shop", "name": "web", "labels": 3}});
        let error = labels(&object).unwrap_err();
        assert!(
            error.starts_with("X shop/web: metadata.labels: invalid type: "),
            "{error}"
        );
        assert_eq!(field::<Vec<u32>>(&object, "/spec/ports"), Ok(Vec::new()));
    }
}
