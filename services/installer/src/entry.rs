//! Renders inpod's entry in a conflist.

use inpod_cni::config::{AgentUnavailable, Level};
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
pub fn standalone(config: &Config, entry: &Plugin) -> Vec<u8> {
    let mut file = Map::new();
    file.insert("cniVersion".to_owned(), STANDALONE_VERSION.into());
    file.insert("name".to_owned(), config.standalone_name.clone().into());
    if config.standalone_file.ends_with(".conflist") {
        file.insert("plugins".to_owned(), json!([entry.text]));
    } else {
        file.append(&mut settings(config));
    }
    format!("{}\n", Value::from(file)).into_bytes()
}

fn settings(config: &Config) -> Map<String, Value> {
    let namespaces = config.exclude_namespaces.iter().map(ToString::to_string);
    let mut settings = Map::new();
    let mut put = |key: &str, value: Value| drop(settings.insert(key.to_owned(), value));
    put("type", INPOD_CNI.into());
    put("agentSocket", config.agent_socket.to_string_lossy().into());
    put(
        "stateDir",
        config.plugin_state_dir().to_string_lossy().into(),
    );
    put("timeoutSeconds", config.plugin_timeout_seconds.into());
    put("excludeNamespaces", namespaces.collect::<Vec<_>>().into());
    put(
        "agentUnavailable",
        unavailable(config.agent_unavailable).into(),
    );
    put("logLevel", format_level(config.plugin_log_level).into());
    if let Some(namespace) = &config.plugin_default_namespace {
        put("defaultNamespace", namespace.to_string().into());
    }
    settings
}

fn unavailable(setting: AgentUnavailable) -> &'static str {
    match setting {
        AgentUnavailable::Fail => "fail",
        AgentUnavailable::Allow => "allow",
    }
}

fn format_level(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}

#[cfg(test)]
mod tests {
    use inpod_cni::config::NetworkConfig;

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
        let mut stdin: Map<String, Value> =
            serde_json::from_str(entry(&config).text.get()).unwrap();
        stdin.insert("name".to_owned(), "n".into());
        stdin.insert("cniVersion".to_owned(), "1.0.0".into());
        let read = NetworkConfig::parse(Value::from(stdin).to_string().as_bytes())
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
        let text = standalone(&list, &entry(&list));
        assert_eq!(Conflist::parse(&text).unwrap().name, "mesh");
        let single = config(&[("standalone_file", "inpod.conf")]);
        let text = standalone(&single, &entry(&single));
        assert_eq!(
            Conflist::parse_single(&text).unwrap().plugins[0].kind,
            INPOD_CNI
        );
    }
}
