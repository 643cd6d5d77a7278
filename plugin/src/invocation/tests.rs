use proptest::prelude::*;

use super::*;
use crate::error::ErrorCode;

const CONFIG: &str = r#"{"cniVersion":"1.1.0","name":"net","type":"inpod-cni"}"#;

fn variables(command: &str) -> Variables {
    let some = |text: &str| Some(text.to_owned());
    Variables {
        command: some(command),
        container_id: some("c1"),
        netns: some("/run/netns/a"),
        ifname: some("eth0"),
        args: some("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
    }
}

fn parse(variables: &Variables, stdin: &str) -> Result<Invocation, CniError> {
    Invocation::parse(variables, stdin.as_bytes())
}

#[test]
fn an_add_has_sandbox_netns_and_pod() {
    let Ok(Invocation::Add(add)) = parse(&variables("ADD"), CONFIG) else {
        panic!("no ADD");
    };
    assert_eq!(add.sandbox.to_string(), "net/c1/eth0");
    assert_eq!(add.netns.to_str(), Some("/run/netns/a"));
    assert_eq!(add.pod.unwrap().to_string(), "shop/web-0");
}

#[test]
fn a_del_needs_no_netns_and_no_readable_pod() {
    let bare = Variables {
        netns: None,
        args: Some("?".to_owned()),
        ..variables("DEL")
    };
    let Ok(Invocation::Del(del)) = parse(&bare, CONFIG) else {
        panic!("no DEL");
    };
    assert_eq!(del.netns, None);
    assert!(del.pod.is_err());
}

#[test]
fn what_is_missing_is_named_all_at_once() {
    let nothing = |command: &str| Variables {
        command: Some(command.to_owned()),
        ..Variables::default()
    };
    for (verb, names) in [
        ("ADD", "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME: missing"),
        ("CHECK", "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME: missing"),
        ("DEL", "CNI_CONTAINERID, CNI_IFNAME: missing"),
    ] {
        let error = parse(&nothing(verb), CONFIG).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidEnvironment);
        assert!(error.msg.starts_with(names), "{error}");
    }
}

#[test]
fn what_is_illegal_is_error_4_and_named() {
    let good = variables("ADD");
    let some = |text: &str| Some(text.to_owned());
    for (bad, named) in [
        (
            Variables {
                command: None,
                ..good.clone()
            },
            "CNI_COMMAND",
        ),
        (
            Variables {
                command: some("add"),
                ..good.clone()
            },
            "CNI_COMMAND",
        ),
        (
            Variables {
                container_id: some("../c"),
                ..good.clone()
            },
            "CNI_CONTAINERID",
        ),
        (
            Variables {
                ifname: some("eth0/.."),
                ..good.clone()
            },
            "CNI_IFNAME",
        ),
        (
            Variables {
                netns: some("run/netns/a"),
                ..good.clone()
            },
            "CNI_NETNS",
        ),
        (
            Variables {
                netns: Some(format!("/{}", "a".repeat(4096))),
                ..good.clone()
            },
            "CNI_NETNS",
        ),
        (
            Variables {
                args: some("K8S_POD_NAME"),
                ..good.clone()
            },
            "CNI_ARGS",
        ),
    ] {
        let error = parse(&bad, CONFIG).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidEnvironment);
        assert!(error.msg.starts_with(named), "{error}");
    }
}

#[test]
fn a_verb_is_refused_in_versions_that_do_not_know_it() {
    for (verb, version, known) in [
        ("ADD", "0.1.0", true),
        ("DEL", "0.1.0", true),
        ("ADD", "0.2.0", true),
        ("CHECK", "0.1.0", false),
        ("CHECK", "0.2.0", false),
        ("CHECK", "0.3.1", false),
        ("CHECK", "0.4.0", true),
        ("STATUS", "0.1.0", false),
        ("STATUS", "1.0.0", false),
        ("STATUS", "1.1.0", true),
        ("GC", "0.2.0", false),
        ("GC", "1.0.0", false),
    ] {
        let config = CONFIG.replace("1.1.0", version);
        let parsed = parse(&variables(verb), &config);
        assert_eq!(parsed.is_ok(), known, "{verb} in {version}");
        if let Err(error) = parsed {
            assert_eq!(error.code, ErrorCode::IncompatibleVersion);
            assert!(error.msg.contains(verb) && error.msg.contains(version));
        }
    }
}

#[test]
fn a_configuration_without_a_version_is_one_of_0_1_0() {
    for config in [
        CONFIG.replace("1.1.0", ""),
        CONFIG.replace(r#""cniVersion":"1.1.0","#, ""),
    ] {
        for verb in ["ADD", "DEL"] {
            let parsed = parse(&variables(verb), &config).unwrap();
            assert_eq!(parsed.config().unwrap().version, SpecVersion::V0_1_0);
        }
        for verb in ["CHECK", "GC", "STATUS"] {
            let error = parse(&variables(verb), &config).unwrap_err();
            assert_eq!(error.code, ErrorCode::IncompatibleVersion);
            assert!(error.msg.ends_with("the configuration has 0.1.0"));
        }
    }
}

#[test]
fn a_gc_without_its_list_is_refused() {
    let error = parse(&variables("GC"), CONFIG).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidConfig);
    assert!(error.msg.contains("cni.dev/valid-attachments"));
    let config = CONFIG.replace('}', r#","cni.dev/valid-attachments":[]}"#);
    assert!(parse(&variables("GC"), &config).is_ok());
}

#[test]
fn version_is_answered_whatever_comes_with_it() {
    for stdin in [
        "",
        "{",
        "{}",
        r#"{"cniVersion":""}"#,
        r#"{"cniVersion":"0.1.0"}"#,
        r#"{"cniVersion":"9"}"#,
    ] {
        let probe = Variables {
            ifname: Some("dummy".to_owned()),
            netns: Some("dummy".to_owned()),
            command: Some("VERSION".to_owned()),
            ..Variables::default()
        };
        let parsed = parse(&probe, stdin);
        assert!(matches!(
            parsed,
            Ok(Invocation::Version(SpecVersion::NEWEST))
        ));
    }
}

/// Generates a valid call, and replaces, removes or inserts a few bytes.
fn mutated() -> impl Strategy<Value = (Variables, Vec<u8>)> {
    let verbs = prop::sample::select(vec!["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"]);
    let splice = (
        any::<prop::sample::Index>(),
        0_usize..8,
        prop::collection::vec(any::<u8>(), 0..8),
    );
    (verbs, prop::collection::vec((0_usize..6, splice), 0..4)).prop_map(|(verb, changes)| {
        let stdin = r#"{"cniVersion":"1.1.0","name":"net","type":"inpod-cni","timeoutSeconds":7,
            "excludeNamespaces":["a"],"cni.dev/valid-attachments":[{"containerID":"c","ifname":"eth0"}],
            "prevResult":{"interfaces":[{"name":"eth0","sandbox":"/n"}],"ips":[{"address":"10.0.0.2/24","interface":0}]}}"#;
        let v = variables(verb);
        let mut fields: Vec<Vec<u8>> = [v.command, v.container_id, v.netns, v.ifname, v.args]
            .into_iter()
            .map(|field| field.unwrap_or_default().into_bytes())
            .collect();
        fields.push(stdin.as_bytes().to_vec());
        for (field, (at, remove, insert)) in changes {
            let bytes = &mut fields[field];
            let start = at.index(bytes.len() + 1);
            let end = (start + remove).min(bytes.len());
            bytes.splice(start..end, insert);
        }
        let stdin = fields.pop().unwrap();
        let mut texts = fields.into_iter().map(|f| Some(String::from_utf8_lossy(&f).into_owned()));
        let mut next = || texts.next().flatten();
        let variables = Variables {
            command: next(),
            container_id: next(),
            netns: next(),
            ifname: next(),
            args: next(),
        };
        (variables, stdin)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn a_mutated_call_is_parsed_or_refused_with_one_json_line((variables, stdin) in mutated()) {
        match Invocation::parse(&variables, &stdin) {
            Ok(Invocation::Add(add)) => {
                prop_assert!(add.netns.is_absolute());
                // The test looks for panics, so the addresses do not matter.
                let _read = crate::result::addresses(&add.config, &add.sandbox.ifname);
            }
            Ok(_) => {}
            Err(error) => {
                let json = SpecVersion::for_reply(&stdin).render_error(&error);
                prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
                prop_assert!(!json.contains('\n'));
                prop_assert!(json.len() < 2000, "{}", json);
            }
        }
    }
}
