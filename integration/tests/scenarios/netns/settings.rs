//! With unusable settings or sockets a service ends at once, names the fault, and changes nothing.

use std::{
    fs,
    os::unix::{fs::symlink, net::UnixListener},
    path::Path,
    process::Command,
};

use integration::{SERVICES, TIMEOUT, bin};
use nix::{sys::stat::Mode, unistd::mkfifo};

/// With these a service must not start.
#[derive(Default)]
struct Wrong<'a> {
    flags: &'a [&'a str],
    variables: &'a [(&'a str, &'a str)],
    file: Option<&'a str>,
}

/// One service's run directory, removed on drop.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        // Short and in memory: a socket's path has at most 107 bytes.
        Self(tempfile::tempdir_in("/run").unwrap())
    }

    fn run_dir(&self) -> String {
        self.0.path().join("inpod").display().to_string()
    }

    /// The service must fail within a second; returns its message.
    fn refused(&self, service: &str, wrong: &Wrong<'_>) -> String {
        let mut command = Command::new(bin(service).unwrap());
        command.env_clear().envs(wrong.variables.iter().copied());
        let file = self.0.path().join("settings.toml");
        if let Some(text) = wrong.file {
            fs::write(&file, text).unwrap();
            command.arg("--config").arg(&file);
        }
        let given = |name: &str| {
            let variable = format!("INPOD_{}", name.to_uppercase().replace('-', "_"));
            wrong.flags.contains(&format!("--{name}").as_str())
                || wrong.variables.iter().any(|(known, _)| *known == variable)
        };
        let zds = self.0.path().join("zds/ztunnel.sock").display().to_string();
        let pods = format!("dir:{}", self.0.path().display());
        let mut defaults = vec![("run-dir", self.run_dir()), ("peer", "uid".to_owned())];
        match service {
            "pod-events" => {
                let state = self.0.path().join("state").display().to_string();
                defaults.extend([
                    ("node-name", "n".to_owned()),
                    ("pods-from", pods),
                    ("plugin-state-dir", state),
                ]);
            }
            "ztunnel-broker" => {
                defaults.extend([("zds-socket", zds), ("ztunnel-peer", "uid".to_owned())]);
            }
            _ => {}
        }
        for (name, value) in defaults {
            if !given(name)
                && wrong
                    .file
                    .is_none_or(|text| !text.contains(&name.replace('-', "_")))
            {
                command.args([format!("--{name}"), value]);
            }
        }
        ends(command.args(wrong.flags))
    }

    fn is_untouched(&self) -> bool {
        let names = fs::read_dir(self.0.path()).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name());
        names.all(|name| name == "settings.toml")
    }
}

/// The command must fail, or is stopped; returns its standard error.
fn ends(command: &mut Command) -> String {
    let child = command
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn();
    let mut child = child.unwrap();
    let status = integration::eventually("it ends", TIMEOUT, || {
        child
            .try_wait()
            .map_err(|error| error.to_string())?
            .ok_or_else(|| "it runs".to_owned())
    });
    child.kill().unwrap_or_default();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let status = status.unwrap_or_else(|error| unreachable!("{command:?}: {error}: {text}"));
    // Only clap's command line errors mention --help.
    let expected = if text.contains("'--help'") { 2 } else { 1 };
    assert!(status.code() == Some(expected), "{status}: {text}");
    text
}

/// Returns unknown settings and invalid values, with the message's required part.
fn wrongs() -> Vec<(Wrong<'static>, &'static [&'static str])> {
    let flags = |flags| Wrong {
        flags,
        ..Wrong::default()
    };
    let variables = |variables| Wrong {
        variables,
        ..Wrong::default()
    };
    let file = |text| Wrong {
        file: Some(text),
        ..Wrong::default()
    };
    vec![
        (flags(&["--log-levl", "info"]), &["--log-levl"]),
        (flags(&["--log-level"]), &["--log-level"]),
        (flags(&["info"]), &["info"]),
        (flags(&["--log-level", "loud"]), &["log_level"]),
        (flags(&["--log-format", "xml"]), &["log_format", "xml"]),
        (
            flags(&["--otlp-endpoint", "collector"]),
            &["--otlp-endpoint", "was removed"],
        ),
        (
            flags(&["--health-address", "15041"]),
            &["health_address", "15041", "ADDRESS:PORT"],
        ),
        (flags(&["--peer", "everybody"]), &["peer", "everybody"]),
        (flags(&["--peer", "cgroup:relative"]), &["peer", "relative"]),
        (
            variables(&[("INPOD_LOG_LEVL", "info")]),
            &[
                "INPOD_LOG_LEVL",
                "the environment",
                "did you mean log_level",
            ],
        ),
        (variables(&[("INPOD_LOG_LEVEL", "loud")]), &["log_level"]),
        (
            variables(&[("INPOD_", "1")]),
            &["INPOD_", "the environment"],
        ),
        (
            file("log_levl = \"info\""),
            &["log_levl", "settings.toml", "did you mean log_level"],
        ),
        (file("log_level = 7"), &["log_level"]),
        (file("log_level = [\"info\"]"), &["log_level"]),
        (file("[log]\nlevel = \"info\""), &["log", "settings.toml"]),
        (file("log_level = "), &["settings.toml"]),
        (
            file("log_level = \"info\"\nlog_level = \"warn\""),
            &["settings.toml", "log_level"],
        ),
        (
            flags(&["--config", "/run/nowhere.toml"]),
            &["/run/nowhere.toml"],
        ),
    ]
}

/// Programs whose command line people use.
const PROGRAMS: [&str; 7] = [
    "netconfig",
    "ztunnel-broker",
    "pod-events",
    "installer",
    "repair",
    "injector",
    "inpod",
];

#[test]
fn help_and_version_are_printed_without_any_configuration_and_nothing_else_is_done() {
    for program in PROGRAMS {
        for flag in ["--help", "--version", "-h", "-V"] {
            let place = tempfile::tempdir_in("/run").unwrap();
            let mut command = Command::new(bin(program).unwrap());
            command.env_clear().env("INPOD_RUN_DIR", place.path());
            let output = command.arg(flag).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{program} {flag}: {text}");
            assert!(text.contains(program), "{program} {flag}: {text}");
            assert_eq!(output.stderr, b"", "{program} {flag}");
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(80), "{program} {flag}: {text}");
            assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        }
    }
}

#[test]
fn a_wrong_command_line_ends_every_program_with_the_same_exit_code() {
    for program in PROGRAMS {
        let mut command = Command::new(bin(program).unwrap());
        let output = command
            .env_clear()
            .arg("--no-such-option")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{program}: {output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("--no-such-option"), "{program}: {text}");
    }
}

#[test]
fn settings_that_cannot_be_used_end_a_service_by_their_name_before_it_touches_anything() {
    let mut wrong = Vec::new();
    for service in SERVICES {
        for (settings, words) in wrongs() {
            let place = Place::new();
            let text = place.refused(service, &settings);
            if !words.iter().all(|word| text.contains(word)) {
                wrong.push(format!(
                    "{service} {:?} {:?} {:?}: {text}",
                    settings.flags, settings.variables, settings.file
                ));
            }
            assert!(place.is_untouched(), "{service}: {text}");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

const UNUSABLE: &[(&str, &[&str])] = &[
    ("netconfig", &["--sweep-seconds", "0"]),
    ("netconfig", &["--sweep-seconds=-1"]),
    ("netconfig", &["--sweep-seconds", "soon"]),
    ("netconfig", &["--verify-seconds", "0"]),
    ("ztunnel-broker", &["--ack-timeout-seconds", "0"]),
    ("ztunnel-broker", &["--ack-timeout-seconds", "1.5"]),
    ("ztunnel-broker", &["--ack-timeout-seconds", "99999"]),
    ("ztunnel-broker", &["--undo-reserve-seconds=-3"]),
    ("ztunnel-broker", &["--ztunnel-peer", "pods"]),
    ("ztunnel-broker", &["--ztunnel-peer", "cgroup:relative"]),
    ("pod-events", &["--ztunnel-pods", "app=ztunnel"]),
    ("pod-events", &["--node-name", "Node!"]),
    ("pod-events", &["--node-name", ""]),
    ("pod-events", &["--pods-from", "nowhere"]),
    ("pod-events", &["--pods-from", "dir:relative"]),
    ("pod-events", &["--exclude-namespaces", "Shop!"]),
    ("pod-events", &["--enablement-selectors", ""]),
    (
        "pod-events",
        &["--enablement-selectors", "[{podSelector: {match: {}}}]"],
    ),
    ("pod-events", &["--pods-may", "everything"]),
    ("pod-events", &["--metrics-address", "localhost"]),
    ("pod-events", &["--drain-grace-seconds", "9999999999"]),
];

#[test]
fn settings_of_one_service_that_cannot_be_used_end_it_by_their_name() {
    for (service, flags) in UNUSABLE {
        let place = Place::new();
        let wrong = Wrong {
            flags,
            ..Wrong::default()
        };
        let text = place.refused(service, &wrong);
        let flag = flags[0].trim_start_matches("--").split('=').next();
        let named = flag.unwrap().replace('-', "_");
        assert!(text.contains(&named), "{service} {flags:?}: {text}");
        assert!(place.is_untouched(), "{service} {flags:?}");
    }
}

#[test]
fn a_setting_that_has_to_be_said_and_is_not_is_named() {
    for (service, setting) in [("pod-events", "node_name"), ("pod-events", "pods_from")] {
        let mut command = Command::new(bin(service).unwrap());
        let other = if setting == "node_name" {
            ["--pods-from", "dir:/"]
        } else {
            ["--node-name", "n"]
        };
        let text = ends(command.env_clear().args(other));
        assert!(
            text.contains(&format!("setting {setting} is required")),
            "{text}"
        );
    }
}

#[test]
fn of_conflicting_settings_the_later_source_is_in_force_and_says_so() {
    for service in SERVICES {
        let place = tempfile::tempdir_in("/run").unwrap();
        let file = place.path().join("settings.toml");
        fs::write(
            &file,
            "log_level = \"error\"\nlog_format = \"text\"\nrun_dir = \"/run/file\"\n",
        )
        .unwrap();
        let mut command = Command::new(bin(service).unwrap());
        command
            .env_clear()
            .env("INPOD_LOG_LEVEL", "warn")
            .env("INPOD_RUN_DIR", "/run/environment");
        command
            .arg("--config")
            .arg(&file)
            .args(["--log-level", "debug", "--print-config"]);
        if service == "pod-events" {
            command.args(["--node-name", "n", "--pods-from", "dir:/"]);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let origin = file.display();
        for line in [
            "log_level = \"debug\" # command line",
            "run_dir = \"/run/environment\" # environment",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert!(
            text.contains(&format!("log_format = \"text\" # {origin}")),
            "{text}"
        );
    }
}

/// Puts something that is no socket there.
fn put(what: &str, path: &Path) {
    match what {
        "directory" => fs::create_dir(path).unwrap(),
        "file" => fs::write(path, "precious").unwrap(),
        "link" => symlink("/run/nowhere", path).unwrap(),
        _ => mkfifo(path, Mode::S_IRWXU).unwrap(),
    }
}

#[test]
fn a_socket_that_cannot_be_had_ends_a_service_and_what_is_in_the_way_stays() {
    for service in SERVICES {
        let long = Place::new();
        let run_dir = format!("{}/{}", long.0.path().display(), "x".repeat(100));
        let text = long.refused(
            service,
            &Wrong {
                flags: &["--run-dir", &run_dir],
                ..Wrong::default()
            },
        );
        assert!(
            text.contains("more than 107") && text.contains("run_dir"),
            "{service}: {text}"
        );

        for what in ["directory", "file", "link", "fifo"] {
            let place = Place::new();
            let socket = inpod_service::socket(Path::new(&place.run_dir()), service);
            fs::create_dir_all(socket.parent().unwrap()).unwrap();
            put(what, &socket);
            let before = fs::symlink_metadata(&socket).unwrap().file_type();
            let text = place.refused(service, &Wrong::default());
            let path = socket.display().to_string();
            assert!(
                text.contains(&path) && text.contains("is in the way"),
                "{service} {what}: {text}"
            );
            assert_eq!(fs::symlink_metadata(&socket).unwrap().file_type(), before);
        }

        let place = Place::new();
        let socket = inpod_service::socket(Path::new(&place.run_dir()), service);
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        let text = place.refused(service, &Wrong::default());
        assert!(text.contains("already served"), "{service}: {text}");
        assert!(std::os::unix::net::UnixStream::connect(&socket).is_ok());

        // The directory itself is unusable.
        let place = Place::new();
        fs::write(place.run_dir(), "a file").unwrap();
        let text = place.refused(service, &Wrong::default());
        assert!(text.contains(&place.run_dir()), "{service}: {text}");
    }
}

#[test]
fn the_sockets_beside_grpcs_are_had_under_the_same_conditions() {
    let place = Place::new();
    let zds = place.0.path().join("zds.sock");
    put("directory", &zds);
    let flag = zds.display().to_string();
    let wrong = |path: &str| {
        place.refused(
            "ztunnel-broker",
            &Wrong {
                flags: &["--zds-socket", path],
                ..Wrong::default()
            },
        )
    };
    let text = wrong(&flag);
    assert!(
        text.contains(&flag) && text.contains("is in the way"),
        "{text}"
    );
    let long = format!("/run/{}", "x".repeat(200));
    let text = wrong(&long);
    assert!(text.contains("more than 107"), "{text}");

    let place = Place::new();
    let netns = Path::new(&place.run_dir()).join("netns");
    fs::create_dir_all(&netns).unwrap();
    let socket = netns.join("netns.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let text = place.refused("netconfig", &Wrong::default());
    assert!(
        text.contains(&socket.display().to_string()) && text.contains("already served"),
        "{text}"
    );
}
