use super::*;

const HEAD: &str = r#""cniVersion":"1.0.0","name":"net","type":"inpod-cni""#;

fn with(keys: &str) -> Result<NetworkConfig, CniError> {
    NetworkConfig::parse(format!("{{{HEAD},{keys}}}").as_bytes())
}

#[test]
fn the_defaults_are_those_of_a_stock_node() {
    let config = NetworkConfig::parse(format!("{{{HEAD}}}").as_bytes()).unwrap();
    let settings = &config.settings;
    assert_eq!(config.version, SpecVersion::V1_0_0);
    assert_eq!(config.name.as_str(), "net");
    assert_eq!(config.plugin_type, "inpod-cni");
    assert!(config.prev_result.is_none() && config.valid_attachments.is_none());
    assert_eq!(
        settings.agent_socket.to_str(),
        Some("/run/inpod/pod-events/grpc.sock")
    );
    assert_eq!(settings.state_dir.to_str(), Some("/var/lib/inpod/plugin"));
    assert_eq!(settings.timeout, Duration::from_secs(30));
    assert!(settings.exclude_namespaces.is_empty());
    assert_eq!(settings.default_namespace, None);
    assert_eq!(settings.agent_unavailable, AgentUnavailable::Fail);
    assert_eq!(settings.log_level, Level::Info);
}

#[test]
fn every_key_of_ours_is_read() {
    let settings = with(
        r#""agentSocket":"/s","stateDir":"/d","timeoutSeconds":7,"excludeNamespaces":["kube-system"],"defaultNamespace":"edge",
           "agentUnavailable":"allow","logLevel":"debug""#,
    )
    .unwrap()
    .settings;
    assert_eq!(settings.agent_socket.to_str(), Some("/s"));
    assert_eq!(settings.state_dir.to_str(), Some("/d"));
    assert_eq!(settings.timeout, Duration::from_secs(7));
    assert!(settings.excludes(&"kube-system".parse().unwrap()));
    assert!(!settings.excludes(&"shop".parse().unwrap()));
    assert_eq!(settings.default_namespace, Some("edge".parse().unwrap()));
    assert_eq!(settings.agent_unavailable, AgentUnavailable::Allow);
    assert_eq!(settings.log_level, Level::Debug);
}

#[test]
fn null_is_as_good_as_no_key() {
    let config = with(r#""timeoutSeconds":null,"prevResult":null,"logLevel":null"#).unwrap();
    assert_eq!(config.settings.timeout, Duration::from_secs(30));
    assert!(config.prev_result.is_none());
}

#[test]
fn keys_of_the_runtime_and_of_others_are_ignored() {
    assert!(with(r#""kubernetes":{"kubeconfig":"/x"},"capabilities":{},"runtimeConfig":{"a":[1]},"args":7"#).is_ok());
}

#[test]
fn a_key_of_the_wrong_type_or_value_is_error_7_and_named() {
    for (key, value) in [
        ("agentSocket", "5"),
        ("agentSocket", r#""run/grpc.sock""#),
        ("agentSocket", r#""/a\u0000b""#),
        ("stateDir", "[]"),
        ("stateDir", r#""""#),
        ("timeoutSeconds", r#""30""#),
        ("timeoutSeconds", "0"),
        ("timeoutSeconds", "-1"),
        ("timeoutSeconds", "1.5"),
        ("timeoutSeconds", "601"),
        ("excludeNamespaces", r#""kube-system""#),
        ("excludeNamespaces", r#"["Kube_System"]"#),
        ("defaultNamespace", r#""Edge""#),
        ("defaultNamespace", r#"["edge"]"#),
        ("excludeNamespaces", "[7]"),
        ("agentUnavailable", r#""open""#),
        ("logLevel", r#""loud""#),
        ("prevResult", "[]"),
        ("prevResult", "7"),
        ("cni.dev/valid-attachments", "{}"),
        ("cni.dev/valid-attachments", r#"[{"containerID":"a"}]"#),
        (
            "cni.dev/valid-attachments",
            r#"[{"containerID":"../a","ifname":"eth0"}]"#,
        ),
    ] {
        let error = with(&format!("{key:?}:{value}")).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidConfig, "{key}: {value}");
        assert!(error.msg.contains(key), "{error}");
    }
}

#[test]
fn a_socket_path_too_long_for_the_kernel_is_refused_here() {
    let fits = format!(r#""agentSocket":"/{}""#, "a".repeat(106));
    let long = format!(r#""agentSocket":"/{}""#, "a".repeat(107));
    assert!(with(&fits).is_ok());
    assert!(with(&long).unwrap_err().msg.contains("107"));
}

#[test]
fn a_missing_or_illegal_key_of_the_spec_is_named() {
    for (text, code, named) in [
        (
            r#"{"cniVersion":"1.2.0"}"#,
            ErrorCode::IncompatibleVersion,
            "1.2.0",
        ),
        (
            r#"{"cniVersion":1}"#,
            ErrorCode::InvalidConfig,
            "cniVersion",
        ),
        (
            r#"{"cniVersion":"1.0.0","type":"t"}"#,
            ErrorCode::InvalidConfig,
            "name",
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"","type":"t"}"#,
            ErrorCode::InvalidConfig,
            "name",
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"a/b","type":"t"}"#,
            ErrorCode::InvalidConfig,
            "name",
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"n"}"#,
            ErrorCode::InvalidConfig,
            "type",
        ),
    ] {
        let error = NetworkConfig::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.code, code, "{text}");
        assert!(error.msg.contains(named), "{error}");
    }
}

#[test]
fn what_is_no_json_object_is_error_6() {
    for text in [
        "",
        " \n",
        "null",
        "7",
        "[]",
        r#"["1.0.0","net","inpod-cni"]"#,
        "{",
        r#"{"cniVersion":"1.0.0""#,
        r#"{"name":"a","name":"b"}"#,
        "{} {}",
        "{\"name\":\"\u{0}\"}",
    ] {
        let error = NetworkConfig::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Decode, "{text:?}");
    }
    let latin1 = b"{\"name\":\"\xfc\"}";
    assert_eq!(
        NetworkConfig::parse(latin1).unwrap_err().code,
        ErrorCode::Decode
    );
}

#[test]
fn valid_attachments_are_read_and_an_empty_list_is_not_an_absent_one() {
    let config =
        with(r#""cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0","x":1}]"#);
    let attachment = ValidAttachment {
        container_id: "c1".parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    };
    assert_eq!(config.unwrap().valid_attachments, Some(vec![attachment]));
    let empty = with(r#""cni.dev/valid-attachments":[]"#).unwrap();
    assert_eq!(empty.valid_attachments, Some(vec![]));
}

#[test]
fn a_deeply_nested_prev_result_is_carried_without_recursion() {
    let deep = format!(
        r#""prevResult":{{"x":{}{}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert!(with(&deep).unwrap().prev_result.is_some());
}
