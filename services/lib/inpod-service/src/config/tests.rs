use std::io::Write as _;

use super::*;

const SERVICE: Service = Service {
    name: "netconfig",
    about: "about",
    version: "1.2.3",
    keys: &[
        Key {
            name: "netns_roots",
            default: Some("/run/netns,/proc"),
            help: "roots",
        },
        Key {
            name: "sweep_seconds",
            default: Some("5"),
            help: "sweep",
        },
    ],
};

#[derive(Debug, Deserialize)]
struct Own {
    #[serde(deserialize_with = "list")]
    netns_roots: Vec<PathBuf>,
    sweep_seconds: u64,
}

fn load_with(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Command, ConfigError> {
    let arguments: Vec<OsString> = [&["netconfig"], arguments]
        .concat()
        .iter()
        .map(Into::into)
        .collect();
    load(
        &SERVICE,
        &arguments,
        environment.iter().map(|(k, v)| (k.into(), v.into())),
    )
}

fn own(arguments: &[&str], environment: &[(&str, &str)]) -> Own {
    let Command::Run(loaded) = load_with(arguments, environment).unwrap() else {
        panic!("expected to run");
    };
    loaded.parse().unwrap().1
}

fn refused(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    match load_with(arguments, environment) {
        Err(error) => format!("{:#}", anyhow::Error::from(error)),
        Ok(Command::Run(loaded)) => {
            format!(
                "{:#}",
                anyhow::Error::from(loaded.parse::<Own>().unwrap_err())
            )
        }
        Ok(other) => panic!("{other:?}"),
    }
}

fn file_with(text: &str) -> (tempfile::NamedTempFile, String) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

#[test]
fn defaults_hold_where_nothing_is_said() {
    let own = own(&[], &[]);
    assert_eq!(own.netns_roots, ["/run/netns", "/proc"].map(PathBuf::from));
    assert_eq!(own.sweep_seconds, 5);
}

#[test]
fn a_flag_beats_the_environment_and_that_the_file() {
    let (_file, path) = file_with("sweep_seconds = 7\nnetns_roots = [\"/a\", \"/b\"]\n");
    assert_eq!(own(&["--config", &path], &[]).sweep_seconds, 7);
    assert_eq!(
        own(&["--config", &path], &[]).netns_roots,
        ["/a", "/b"].map(PathBuf::from)
    );
    let environment = [("INPOD_SWEEP_SECONDS", "8")];
    assert_eq!(own(&["--config", &path], &environment).sweep_seconds, 8);
    assert_eq!(
        own(&["--config", &path, "--sweep-seconds", "9"], &environment).sweep_seconds,
        9
    );
}

#[test]
fn an_unknown_key_names_itself_its_origin_and_the_one_that_is_meant() {
    let (_file, path) = file_with("sweep_second = 7\n");
    let error = refused(&["--config", &path], &[]);
    assert_eq!(
        error,
        format!("unknown setting sweep_second in {path}; did you mean sweep_seconds?")
    );
    let error = refused(&[], &[("INPOD_NETNS_ROTS", "x")]);
    assert_eq!(
        error,
        "unknown setting INPOD_NETNS_ROTS in the environment; did you mean netns_roots?"
    );
    assert!(refused(&["--sweep-second", "1"], &[]).contains("--sweep-second"));
}

#[test]
fn a_value_of_the_wrong_type_names_its_key() {
    let error = refused(&["--sweep-seconds", "soon"], &[]);
    assert!(
        error.contains("sweep_seconds") && error.contains("soon"),
        "{error}"
    );
    let error = refused(&["--peer", "anyone"], &[]);
    assert!(
        error.contains("peer") && error.contains("anyone"),
        "{error}"
    );
}

#[test]
fn a_file_that_was_asked_for_must_be_there() {
    let error = refused(&["--config", "/nonexistent/x.toml"], &[]);
    assert!(error.contains("/nonexistent/x.toml"), "{error}");
}

#[test]
fn a_required_setting_says_how_to_give_it() {
    const REQUIRED: Service = Service {
        keys: &[Key {
            name: "node_name",
            default: None,
            help: "",
        }],
        ..SERVICE
    };
    let error = load(&REQUIRED, &["x".into()], std::iter::empty())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--node-name") && error.contains("INPOD_NODE_NAME"),
        "{error}"
    );
}

#[test]
fn the_links_that_kubelet_sets_for_a_service_are_no_settings() {
    own(
        &[],
        &[
            ("INPOD_PORT", "tcp://10.0.0.1:443"),
            ("INPOD_SERVICE_HOST", "10.0.0.1"),
        ],
    );
    own(
        &[],
        &[
            ("INPOD_PORT_443_TCP_ADDR", "10.0.0.1"),
            ("INPOD_SERVICE_PORT_HTTPS", "443"),
        ],
    );
    own(&[], &[("HOME", "/root"), ("INPODX", "1")]);
}

#[test]
fn print_config_tells_where_each_value_is_from() {
    let environment = [("INPOD_SWEEP_SECONDS", "8")];
    let Command::PrintConfig(text) =
        load_with(&["--print-config", "--peer", "uid"], &environment).unwrap()
    else {
        panic!("expected the settings");
    };
    assert!(
        text.contains("sweep_seconds = \"8\" # environment\n"),
        "{text}"
    );
    assert!(text.contains("peer = \"uid\" # command line\n"), "{text}");
    assert!(
        text.contains("run_dir = \"/run/inpod\" # default\n"),
        "{text}"
    );
}

#[test]
fn help_and_version_are_no_errors() {
    assert!(matches!(
        load_with(&["--help"], &[]),
        Ok(Command::PrintHelp(_))
    ));
    assert!(matches!(
        load_with(&["--version"], &[]),
        Ok(Command::PrintHelp(_))
    ));
}

/// The error has name, value and source of the setting, for every kind of source.
#[test]
fn a_value_that_cannot_be_used_names_its_setting_and_its_source() {
    let cases = [
        ("sweep_seconds", "soon"),
        ("sweep_seconds", "-1"),
        ("sweep_seconds", "1.5"),
        ("sweep_seconds", ""),
        ("max_calls", "0"),
        ("health_address", "15041"),
        ("health_address", "localhost:15041"),
        ("peer", "anyone"),
        ("peer", ""),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("run_dir", ""),
        ("run_dir", "inpod"),
    ];
    for (key, value) in cases {
        let (_file, path) = file_with(&format!("{key} = {value:?}\n"));
        let flag = format!("--{}={value}", key.replace('_', "-"));
        let variable = format!("INPOD_{}", key.to_uppercase());
        let by_file = refused(&["--config", &path], &[]);
        let by_environment = refused(&[], &[(&variable, value)]);
        let by_flag = refused(&[&flag], &[]);
        for (error, origin) in [
            (by_file, path.as_str()),
            (by_environment, "the environment"),
            (by_flag, "the command line"),
        ] {
            assert!(
                error.contains(key) && error.contains(value) && error.contains(origin),
                "{key} = {value:?} from {origin}: {error}"
            );
        }
    }
}

#[test]
fn a_file_that_cannot_be_used_is_named_with_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("no TOML", "sweep_seconds 7\n", "TOML parse error"),
        (
            "a key twice",
            "sweep_seconds = 7\nsweep_seconds = 8\n",
            "duplicate key",
        ),
        (
            "a table for a value",
            "[sweep_seconds]\nx = 1\n",
            "sweep_seconds",
        ),
        ("a list for a value", "peer = [\"uid\"]\n", "peer"),
        (
            "a value in a list of another type",
            "netns_roots = [true, {}]\n",
            "netns_roots",
        ),
        (
            "a section",
            "[netconfig]\nsweep_seconds = 7\n",
            "unknown setting netconfig",
        ),
    ];
    for (what, text, wanted) in cases {
        let (_file, path) = file_with(text);
        let error = refused(&["--config", &path], &[]);
        assert!(
            error.contains(wanted) && error.contains(&path),
            "{what}: {error}"
        );
    }
    let path = dir.path().to_str().unwrap();
    let error = refused(&["--config", path], &[]);
    assert!(error.contains(path), "a directory: {error}");
}

#[test]
fn a_flag_is_given_once_and_with_its_value() {
    let error = refused(&["--peer", "uid", "--peer", "pod"], &[]);
    assert!(
        error.contains("--peer") && error.contains("multiple times"),
        "{error}"
    );
    let error = refused(&["--peer"], &[]);
    assert!(error.contains("--peer"), "{error}");
    let error = refused(&["netconfig"], &[]);
    assert!(error.contains("netconfig"), "{error}");
}

#[test]
fn sources_that_conflict_are_no_error_and_the_loser_is_still_checked() {
    let (_file, path) = file_with("sweep_seconds = 7\n");
    let conflict = [("INPOD_SWEEP_SECONDS", "8")];
    assert_eq!(
        own(&["--config", &path, "--sweep-seconds", "9"], &conflict).sweep_seconds,
        9
    );
    let (_file, path) = file_with("sweep_second = 7\n");
    let error = refused(&["--config", &path, "--sweep-seconds", "9"], &conflict);
    assert!(
        error.contains("sweep_second ") && error.contains(&path),
        "{error}"
    );
}

#[test]
fn a_removed_setting_is_refused_with_what_to_use_instead() {
    let (_file, path) = file_with("otlp_endpoint = \"\"\n");
    for (error, setting) in [
        (refused(&["--config", &path], &[]), "otlp_endpoint"),
        (
            refused(&[], &[("INPOD_OTLP_ENDPOINT", "")]),
            "INPOD_OTLP_ENDPOINT",
        ),
        (refused(&["--otlp-endpoint", "x"], &[]), "--otlp-endpoint"),
    ] {
        for part in [setting, "was removed", "trace_id", "add_phase_duration"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
    }
    let Ok(Command::PrintHelp(help)) = load_with(&["--help"], &[]) else {
        panic!("expected the help");
    };
    assert!(!help.contains("otlp"), "{help}");
}
