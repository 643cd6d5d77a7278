//! The configuration of a single plugin (`.conf`, `.json`), which runtimes convert to a list.

use crate::{
    Conflist, Malformed,
    conflist::{kind, last, object, wrong_type},
    json,
};

#[derive(Clone, Debug)]
pub struct Conf {
    text: Vec<u8>,
    kind: String,
    name: String,
    version: Option<String>,
}

impl Conf {
    /// Parses the configuration of one plugin as libcni does (`NetworkPluginConfFromBytes`).
    ///
    /// # Errors
    ///
    /// Fails if a runtime would reject the configuration, or if `name` is missing, which every call needs.
    pub fn parse(text: &[u8]) -> Result<Self, Malformed> {
        let members = object(text)?;
        let kind = kind(text, &members).ok_or(Malformed::ListInConf)?;
        let name = last(&members, "name").ok_or(Malformed::Missing("name"))?;
        let version = last(&members, "cniVersion");
        let version = version
            .map(|value| {
                json::string(text, value).ok_or_else(|| wrong_type("cniVersion", "a string"))
            })
            .transpose()?;
        Ok(Self {
            name: json::string(text, name).ok_or_else(|| wrong_type("name", "a string"))?,
            kind,
            version,
            text: text.to_owned(),
        })
    }

    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Converts the configuration as runtimes do (libcni, `ConfListFromConf`): copies `name` and `cniVersion`, and
    /// takes the trimmed text as the plugin, byte for byte.
    pub fn to_list(&self) -> Result<Conflist, Malformed> {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let mut list = b"{".to_vec();
        if let Some(version) = &self.version {
            list.extend_from_slice(format!("\"cniVersion\":{},", quoted(version)).as_bytes());
        }
        list.extend_from_slice(format!("\"name\":{},\"plugins\":[", quoted(&self.name)).as_bytes());
        list.extend_from_slice(self.text.trim_ascii());
        list.extend_from_slice(b"]}\n");
        Conflist::parse(&list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_configuration_becomes_a_list_that_holds_its_text() {
        let text = b"\n{ \"type\":\"bridge\",\n \"cniVersion\": \"1.0.0\", \"name\" : \"a\\u0022b\", \"mtu\": 1e400 }\n\n";
        let list = Conf::parse(text).unwrap().to_list().unwrap();
        let expected = "{\"cniVersion\":\"1.0.0\",\"name\":\"a\\\"b\",\"plugins\":[{ \"type\":\"bridge\",\n \"cniVersion\": \"1.0.0\", \"name\" : \"a\\u0022b\", \"mtu\": 1e400 }]}\n";
        assert_eq!(String::from_utf8_lossy(list.text()), expected);
        assert_eq!(list.name(), "a\"b");
    }

    #[test]
    fn a_list_in_a_conf_is_refused_with_the_name_that_it_should_have() {
        let error =
            Conf::parse(b"{\"name\":\"n\",\"plugins\":[{\"type\":\"bridge\"}]}").unwrap_err();
        assert_eq!(error, Malformed::ListInConf);
        let nameless = Conf::parse(b"{\"type\":\"bridge\"}").unwrap_err();
        assert_eq!(nameless, Malformed::Missing("name"));
    }
}
