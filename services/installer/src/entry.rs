//! Renders inpod's entry in a conflist.

use serde_json::{Map, Value, json, value::to_raw_value};

use crate::{INPOD_CNI, Plugin, config::Config};

/// The CNI version that istio-cni uses, too; every runtime supports this version.
const STANDALONE_VERSION: &str = "0.3.1";

/// Renders the entry with every key of `inpod_cni::config::Settings`, so that the conflist shows the values in force.
pub fn entry(config: &Config) -> Plugin {
    Plugin {
        kind: INPOD_CNI.to_owned(),
        text: to_raw_value(&settings(config)).unwrap_or_default(),
    }
}

/// Renders the standalone file: a list if its name ends in `.conflist`, otherwise a single configuration.
pub fn standalone(config: &Config) -> Vec<u8> {
    let mut file = Map::new();
    file.insert("cniVersion".to_owned(), STANDALONE_VERSION.into());
    file.insert("name".to_owned(), config.standalone_name.clone().into());
    if config.standalone_file.ends_with(".conflist") {
        file.insert("plugins".to_owned(), json!([settings(config)]));
    } else {
        file.append(&mut settings(config));
    }
    format!("{}\n", Value::from(file)).into_bytes()
}

fn settings(config: &Config) -> Map<String, Value> {
    let settings = [
        ("type", json!(INPOD_CNI)),
        ("agentSocket", json!(config.agent_socket)),
        ("stateDir", json!(config.plugin_state_dir)),
        ("timeoutSeconds", json!(config.plugin_timeout_seconds)),
        ("excludeNamespaces", json!(config.exclude_namespaces)),
        ("agentUnavailable", json!(config.agent_unavailable)),
        ("logLevel", json!(config.plugin_log_level)),
    ];
    let namespace = config.plugin_default_namespace.as_ref();
    let namespace = namespace.map(|namespace| ("defaultNamespace", json!(namespace)));
    let settings = settings.into_iter().chain(namespace);
    let settings = settings.map(|(key, value)| (key.to_owned(), value));
    settings.collect()
}

#[cfg(test)]
mod tests {
    use inpod_cni::config::{AgentUnavailable, Level, NetworkConfig};

    use super::*;
    use crate::{Conflist, plan::testing::config};

    #[test]
    fn the_plugin_reads_every_setting_from_the_entry() {
        let config = config(&[
            ("agent_socket", "/x.sock"),
            ("plugin_state_dir", "/state"),
            ("plugin_timeout_seconds", "7"),
            ("exclude_namespaces", "a,b"),
            ("agent_unavailable", "allow"),
            ("plugin_log_level", "trace"),
            ("plugin_default_namespace", "d"),
        ]);
        let mut stdin: Value = serde_json::from_str(entry(&config).text.get()).unwrap();
        stdin["name"] = "n".into();
        stdin["cniVersion"] = "1.0.0".into();
        let read = NetworkConfig::parse(stdin.to_string().as_bytes())
            .unwrap()
            .settings;
        let expected = inpod_cni::config::Settings {
            agent_socket: "/x.sock".into(),
            state_dir: "/state".into(),
            timeout: std::time::Duration::from_secs(7),
            exclude_namespaces: vec!["a".parse().unwrap(), "b".parse().unwrap()],
            default_namespace: Some("d".parse().unwrap()),
            agent_unavailable: AgentUnavailable::Allow,
            log_level: Level::Trace,
        };
        assert_eq!(format!("{read:?}"), format!("{expected:?}"));
    }

    #[test]
    fn a_file_of_our_own_is_a_list_or_a_single_configuration_by_its_name() {
        let list = config(&[("standalone_name", "mesh")]);
        let text = standalone(&list);
        assert_eq!(Conflist::parse(&text).unwrap().name, "mesh");
        let single = config(&[("standalone_file", "inpod.conf")]);
        let text = standalone(&single);
        assert_eq!(
            Conflist::parse_single(&text).unwrap().plugins[0].kind,
            INPOD_CNI
        );
    }
}
