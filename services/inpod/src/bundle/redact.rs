//! Removes secrets: tokens, keys, and the values of labels, annotations and variables that belong neither to inpod nor
//! to Istio. Replaces addresses on request.

mod text;

use std::{cell::RefCell, collections::BTreeMap, net::IpAddr};

use inpod_types::keys;
use serde_json::{Map, Value};

pub(super) const REDACTED: &str = "REDACTED";

/// Keys of objects and lists whose entries hold values of users.
const USER_VALUE_KEYS: [&str; 4] = ["annotations", "labels", "env", "environment"];

/// The prefix of inpod's own variables. The prefixes of labels and annotations are in `inpod_types::keys`.
const OWN_PREFIX: &str = "INPOD_";

/// Parts of keys that name secrets, such as `access_token`.
const SECRET_MARKERS: [&str; 10] = [
    "token",
    "password",
    "passwd",
    "secret",
    "credential",
    "apikey",
    "api-key",
    "api_key",
    "authorization",
    "private",
];

/// Redacts text, and gives the same address the same placeholder throughout the bundle.
#[derive(Debug)]
pub(super) struct Redactor {
    /// The number of each address's placeholder; `None` keeps addresses in the output.
    addresses: Option<RefCell<BTreeMap<IpAddr, usize>>>,
}

impl Redactor {
    pub(super) fn new(addresses: bool) -> Self {
        Self {
            addresses: addresses.then(RefCell::default),
        }
    }

    /// Lists the redacted kinds of values for the manifest.
    pub(super) fn describe(&self) -> &'static str {
        match self.addresses {
            Some(_) => {
                "tokens, keys, certificates, values of labels, annotations and variables that are not inpod's or Istio's, addresses"
            }
            None => {
                "tokens, keys, certificates, values of labels, annotations and variables that are not inpod's or Istio's"
            }
        }
    }

    /// Redacts text, which may be JSON as a whole or have a JSON object at the end of each line.
    pub(super) fn redact_text(&self, text: &str) -> String {
        if let Ok(value @ (Value::Object(_) | Value::Array(_))) = serde_json::from_str(text) {
            return format!("{:#}\n", self.redact_value(value));
        }
        let mut clean = String::with_capacity(text.len());
        for line in text::without_keys(text).split_inclusive('\n') {
            clean += &self.redact_line(line);
        }
        clean
    }

    /// Redacts a line of a log: the runtime's prefix, and the message, which may be a JSON object.
    fn redact_line(&self, line: &str) -> String {
        let start = line.find('{').unwrap_or(line.len());
        let (before, object) = line.split_at(start);
        match serde_json::from_str(object) {
            Ok(value @ Value::Object(_)) => {
                let end = if object.ends_with('\n') { "\n" } else { "" };
                format!("{}{}{end}", self.plain(before), self.redact_value(value))
            }
            Ok(_) | Err(_) => self.plain(line),
        }
    }

    fn plain(&self, text: &str) -> String {
        let text = text::without_tokens(text, &is_secret);
        match &self.addresses {
            Some(known) => text::without_addresses(&text, |address| {
                let mut known = known.borrow_mut();
                let next = known.len() + 1;
                format!("address-{}", known.entry(address).or_insert(next))
            }),
            None => text,
        }
    }

    fn redact_value(&self, value: Value) -> Value {
        match value {
            Value::Object(map) => Value::Object(
                map.into_iter()
                    .map(|(key, value)| self.entry(&key, value))
                    .collect(),
            ),
            Value::Array(list) => list
                .into_iter()
                .map(|value| self.redact_value(value))
                .collect(),
            Value::String(text) => Value::String(self.plain(&text::without_keys(&text))),
            Value::Null | Value::Bool(_) | Value::Number(_) => value,
        }
    }

    fn entry(&self, key: &str, value: Value) -> (String, Value) {
        let clean = match value {
            Value::Object(map) if USER_VALUE_KEYS.contains(&key) => self.chosen(map),
            Value::Array(list) if USER_VALUE_KEYS.contains(&key) => {
                list.into_iter().map(|it| self.variable(it)).collect()
            }
            Value::String(_) if is_secret(key) => REDACTED.into(),
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_)
            | Value::Object(_) => self.redact_value(value),
        };
        (self.plain(key), clean)
    }

    fn chosen(&self, map: Map<String, Value>) -> Value {
        let entries = map.into_iter().map(|(key, value)| {
            let value = if is_known(&key) {
                self.redact_value(value)
            } else {
                REDACTED.into()
            };
            (self.plain(&key), value)
        });
        Value::Object(entries.collect())
    }

    /// Redacts a variable, which is an object with `name` and `value` or a string `NAME=value`.
    fn variable(&self, value: Value) -> Value {
        let name = match &value {
            Value::Object(map) => map.get("name").and_then(Value::as_str).unwrap_or_default(),
            Value::String(text) => text.split('=').next().unwrap_or_default(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => "",
        };
        if is_known(name) {
            return self.redact_value(value);
        }
        serde_json::json!({"name": name, "value": REDACTED})
    }
}

fn is_known(key: &str) -> bool {
    let mut table = keys::table().filter(|known| known.by != keys::INJECTOR);
    key.starts_with(OWN_PREFIX) || table.any(|known| known.name == key)
}

fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRET_MARKERS.iter().any(|marker| key.contains(marker))
        || (key.contains("key") && key.ends_with("data"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JWT: &str = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJlLW9mLWl0";

    fn clean(text: &str) -> String {
        Redactor::new(false).redact_text(text)
    }

    #[test]
    fn values_that_people_chose_are_taken_out_and_those_of_the_mesh_stay() {
        let text = r#"{"metadata":{"annotations":{"team/note":"hunter2","istio.io/dataplane-mode":"ambient","proxy.istio.io/config":"hunter2"}},
            "env":[{"name":"DB","value":"hunter2"},{"name":"INPOD_PEER","value":"pod"},"X=hunter2"],
            "password":"hunter2","plugins":[{"type":"bridge","mtu":1e400}]}"#;
        // The parser reads a number that overflows as text.
        let text = text.replace("1e400", "1400");
        let clean = clean(&text);
        assert!(!clean.contains("hunter2"), "{clean}");
        for kept in [
            "ambient",
            "team/note",
            "INPOD_PEER",
            "\"pod\"",
            "bridge",
            "1400",
        ] {
            assert!(clean.contains(kept), "{kept}: {clean}");
        }
    }

    #[test]
    fn tokens_are_taken_out_wherever_they_stand() {
        for text in [
            format!("Authorization: Bearer {JWT}"),
            format!("got {JWT}, and went on"),
            format!(
                "2026-01-01T00:00:00Z stderr F {{\"message\":\"sent {JWT}\",\"level\":\"info\"}}\n"
            ),
            format!("a line\n{{\"nested\":\"{{\\\"token\\\":\\\"{JWT}\\\"}}\"}}\n"),
            "Authorization: Bearer c2lnbmF0dXJlLW9mLWl0".to_owned(),
            "token=c2lnbmF0dXJlLW9mLWl0 and more".to_owned(),
            "  password: \"c2lnbmF0dXJlLW9mLWl0 with blanks\"\n".to_owned(),
            "-----BEGIN PRIVATE KEY-----\nc2lnbmF0dXJlLW9mLWl0\n-----END PRIVATE KEY-----\n"
                .to_owned(),
            "{\"pem\":\"-----BEGIN X-----\\nc2lnbmF0dXJlLW9mLWl0\\n-----END X-----\"}".to_owned(),
        ] {
            let clean = clean(&text);
            assert!(!clean.contains("c2lnbmF0dXJlLW9mLWl0"), "{text}: {clean}");
            assert!(clean.contains(REDACTED), "{text}: {clean}");
        }
    }

    #[test]
    fn what_is_no_secret_stays_as_it_is() {
        let text = "netns cookie 4711 of pod shop/web at /run/netns/cni-1, 10.0.0.1:15008 [::1] took 3.5ms\n";
        assert_eq!(clean(text), text);
    }

    #[test]
    fn an_address_becomes_the_same_word_everywhere() {
        let redactor = Redactor::new(true);
        let text = "10.0.0.1 to [fd00::1]:53, 10.0.0.1:80 at 12:34:56 of 1.2.3\n";
        let clean = redactor.redact_text(text);
        assert_eq!(
            clean,
            "address-1 to [address-2]:53, address-1:80 at 12:34:56 of 1.2.3\n"
        );
        assert_eq!(redactor.redact_text("fd00::1\n"), "address-2\n");
        assert_eq!(redactor.redact_text("x=10.0.0.1/24\n"), "x=address-1/24\n");
    }
}
