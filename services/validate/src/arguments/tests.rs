use super::*;

fn parsed(arguments: &[&str], variables: &[(&str, &str)]) -> Result<Command, UsageError> {
    let arguments: Vec<_> = arguments.iter().map(OsString::from).collect();
    parse(arguments.into_iter(), |name| {
        let mut known = variables.iter();
        known
            .find(|known| known.0 == name)
            .map(|known| known.1.into())
    })
}

fn settings(arguments: &[&str]) -> Settings {
    match parsed(arguments, &[]) {
        Ok(Command::Validate(settings)) => settings,
        other => panic!("{arguments:?}: {other:?}"),
    }
}

#[test]
fn the_defaults_are_istios_ports_and_five_seconds() {
    let found = settings(&[]);
    let Ports {
        inbound,
        outbound,
        probe,
    } = found.ports;
    assert_eq!((inbound, outbound, probe), (15006, 15001, 15002));
    assert_eq!(
        (found.timeout, found.families),
        (Duration::from_secs(5), Families::Auto)
    );
}

#[test]
fn the_arguments_of_an_unchanged_istio_template_are_understood() {
    let found = settings(&[
        "istio-iptables",
        "-p",
        "15001",
        "-z",
        "15006",
        "-u",
        "1337",
        "-m",
        "REDIRECT",
        "-i",
        "*",
        "-x",
        "",
        "-b",
        "*",
        "-d",
        "15090,15021,15020",
        "-q",
        "80",
        "-o",
        "443",
        "-k",
        "eth9",
        "-c",
        "eth8",
        "--log_output_level=default:info",
        "--log_as_json",
        "--run-validation",
        "--skip-rule-apply",
        "--native-nftables",
    ]);
    assert_eq!(found, settings(&[]));
}

#[test]
fn every_flag_of_istio_iptables_is_taken_with_its_value() {
    let with_value = IGNORED_WITH_VALUE.map(|flag| (flag, &["any"][..]));
    let switches = IGNORED_SWITCHES.map(|flag| (flag, &[][..]));
    for ((short, long), value) in with_value.into_iter().chain(switches) {
        let long = format!("--{long}");
        let arguments = [&[long.as_str()], value].concat();
        assert_eq!(settings(&arguments), settings(&[]), "{long}");
        if !short.is_empty() {
            let glued = format!("-{short}any");
            assert_eq!(settings(&[&glued]), settings(&[]), "{glued}");
        }
    }
}

#[test]
fn a_request_to_apply_rules_is_refused() {
    for arguments in [
        &["istio-iptables"][..],
        &["istio-iptables", "--run-validation"],
        &["istio-iptables", "--skip-rule-apply", "-u", "1337"],
        &[
            "istio-iptables",
            "--run-validation",
            "--skip-rule-apply=false",
        ],
    ] {
        assert_eq!(
            parsed(arguments, &[]),
            Err(UsageError::Rules),
            "{arguments:?}"
        );
    }
    let variables = [("RUN_VALIDATION", "true"), ("SKIP_RULE_APPLY", "1")];
    assert!(parsed(&["istio-iptables"], &variables).is_ok());
}

#[test]
fn a_flag_comes_before_a_variable_and_both_before_the_default() {
    let timeout =
        |arguments: &[&str], variables: &[(&str, &str)]| match parsed(arguments, variables) {
            Ok(Command::Validate(settings)) => settings.timeout.as_millis(),
            other => panic!("{other:?}"),
        };
    let variables = [("PROBE_TIMEOUT", "1m30s")];
    assert_eq!(timeout(&[], &variables), 90_000);
    assert_eq!(timeout(&["--timeout=250ms"], &variables), 250);
    assert_eq!(timeout(&["validate", "--probe-timeout", "1s"], &[]), 1000);
    assert_eq!(settings(&["-z=7000", "-p7001"]).ports.inbound, 7000);
    assert_eq!(settings(&["-z=7000", "-p7001"]).ports.outbound, 7001);
    assert_eq!(
        settings(&["--ip-family", "ipv6"]).families,
        Families::Only(Family::V6)
    );
}

#[test]
fn what_cannot_be_used_is_named() {
    for (arguments, named) in [
        (&["--tiemout", "5s"][..], "--tiemout"),
        (&["15006"], "15006"),
        (&["-y"], "-y"),
        (&["-"], "-"),
        (&["--"], "--"),
        (&["--timeout"], "timeout"),
        (&["--timeout", "soon"], "soon"),
        (&["--timeout", "5"], "\"5\""),
        (&["--timeout", "0s"], "0s"),
        (&["--timeout", "2h"], "2h"),
        (&["--timeout", ""], "timeout"),
        (
            &["--timeout", "18446744073709551615h"],
            "18446744073709551615h",
        ),
        (&["-z", "0"], "0"),
        (&["-z", "65536"], "65536"),
        (&["--ip-family", "both"], "both"),
        (&["--run-validation=perhaps"], "perhaps"),
    ] {
        let error = parsed(arguments, &[]).unwrap_err().to_string();
        assert!(error.contains(named), "{arguments:?}: {error}");
    }
    let error = parsed(&[], &[("IPTABLES_PROBE_PORT", "x")]).unwrap_err();
    assert!(error.to_string().contains("IPTABLES_PROBE_PORT"), "{error}");
}

#[test]
fn bytes_that_are_no_text_are_refused_and_nothing_panics() {
    use std::os::unix::ffi::OsStringExt as _;
    for argument in [vec![0xff], b"--\xff=\xfe".to_vec(), b"-\xff".to_vec()] {
        let arguments = std::iter::once(OsString::from_vec(argument));
        assert!(parse(arguments, |_| None).is_err());
    }
}

#[test]
fn help_and_version_are_printed() {
    assert!(matches!(parsed(&["--help"], &[]), Ok(Command::Print(text)) if text.contains("126")));
    let version = format!("validate {}\n", env!("CARGO_PKG_VERSION"));
    assert!(matches!(parsed(&["--version"], &[]), Ok(Command::Print(text)) if text == version));
}
