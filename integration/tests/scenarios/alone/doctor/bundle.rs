//! A bundle's content, and the secrets that it omits.

use std::{collections::BTreeSet, fs, path::Path};

use integration::{SERVICES, Spec, run};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::alone::doctor::{CHAIN, Host};

/// The number of planted secrets.
const PLANTED: usize = 30;

const NONE: [usize; 0] = [];

/// Returns a secret in one of the forms in which files and labels hold secrets.
fn secret(number: usize) -> String {
    let value = format!("planted{number:02}hunter");
    let token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0";
    match number % 9 {
        0 => format!("Bearer {token}.{value}"),
        1 => format!("password={value}"),
        2 => format!("https://robot:{value}@mirror.example/v2"),
        3 => format!("Cookie: session={value}"),
        4 => format!("--token {value}"),
        5 => format!("-----BEGIN PRIVATE KEY-----{value}"),
        6 => format!("postgres://user:{value}@db/app"),
        7 => format!("ghp_{value}"),
        _ => value,
    }
}

/// Plants 15 secrets in the CNI configuration, and 15 in annotations and labels of a pod.
fn plant(host: &Host) -> Spec {
    let keys: String = (0..15)
        .map(|number| format!(r#""key{number}":"{}","#, secret(number)))
        .collect();
    let conflist = CHAIN.replace(r#""type":"bridge""#, &format!(r#"{keys}"type":"bridge""#));
    assert_eq!(leaks(&conflist), (0..15).collect::<Vec<_>>());
    fs::write(host.conf.join("10-podnet.conflist"), conflist).unwrap();
    let mut spec = Spec::new("web").ambient();
    for number in 15..PLANTED {
        let key = &*format!("example.org/key{number}").leak();
        spec = match number % 3 {
            0 => spec.label(key, &format!("planted{number:02}hunter")),
            _ => spec.annotate(key, &secret(number)),
        };
    }
    spec
}

/// Returns the planted secrets in the text.
fn leaks(text: &str) -> Vec<usize> {
    let is_leaked = |number: &usize| text.contains(&format!("planted{number:02}hunter"));
    (0..PLANTED).filter(is_leaked).collect()
}

fn files(directory: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut ahead = vec![directory.to_owned()];
    while let Some(path) = ahead.pop() {
        if path.is_dir() {
            ahead.extend(
                fs::read_dir(path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
            continue;
        }
        let name = path.strip_prefix(directory).unwrap().display().to_string();
        found.push((name, fs::read_to_string(&path).unwrap()));
    }
    found
}

/// Unpacks an archive with the system's tar.
fn unpacked(archive: &Path) -> Vec<(String, String)> {
    let directory = archive.with_extension("d");
    fs::create_dir(&directory).unwrap();
    let [archive, into] = [archive, &directory].map(|path| path.to_str().unwrap());
    run("tar", &["-xf", archive, "-C", into]).unwrap();
    files(&directory.join("inpod-bundle"))
}

#[test]
fn a_bundle_holds_answers_and_metrics_and_no_secret() {
    let host = Host::new();
    let spec = plant(&host);
    host.node.pod(spec).unwrap();
    let archive = host.conf.with_file_name("bundle.tar");
    let mut command = host.inpod("bundle");
    let output = command.arg("-o").arg(&archive).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stderr, b"");

    let files = unpacked(&archive);
    for (name, text) in &files {
        assert_eq!(leaks(text), NONE, "{name}: {text}");
    }
    for service in SERVICES {
        assert_eq!(
            leaks(&host.node.tail(service, usize::MAX)),
            NONE,
            "{service}"
        );
    }

    let text = |name: &str| {
        let found = files.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("{name} is missing")).1
    };
    assert!(text("pods/000-shop_web.json").contains("ENROLLMENT_AMBIENT"));
    assert!(text("metrics/netconfig.txt").contains("inpod_netconfig_build_info"));
    assert!(text("workloads.json").contains("WORKLOAD_PHASE_ADDED"));
    let doctor: Value = serde_json::from_str(text("doctor.json")).unwrap();
    assert_eq!(doctor["failed"], 0, "{doctor:#}");
    for part in ["netns/000-", "listeners/000-"] {
        assert!(
            files.iter().any(|(name, _)| name.starts_with(part)),
            "{part}"
        );
    }
    // Every listed file is there or has a reason.
    let manifest: Value = serde_json::from_str(text("manifest.json")).unwrap();
    let listed = manifest["parts"].as_array().unwrap().iter();
    let there = listed
        .filter(|part| part["missing"].is_null())
        .map(|part| part["name"].as_str().unwrap());
    let there: BTreeSet<_> = there.collect();
    let names: BTreeSet<_> = files
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| *name != "manifest.json")
        .collect();
    assert_eq!(there, names);
}

#[test]
fn what_cannot_be_had_is_listed_with_its_cause_and_the_rest_is_there() {
    let host = Host::new();
    host.node.stop("netconfig", Signal::SIGKILL).unwrap();
    let output = host.conf.with_file_name("bundle.tar");
    let said = host
        .inpod("bundle")
        .arg("-o")
        .arg(&output)
        .output()
        .unwrap();
    assert!(said.status.success(), "{said:?}");
    let files = unpacked(&output);
    let manifest = files.iter().find(|(name, _)| name == "manifest.json");
    let manifest: Value = serde_json::from_str(&manifest.unwrap().1).unwrap();
    let parts = manifest["parts"].as_array().unwrap();
    let missing = |name: &str| &parts.iter().find(|part| part["name"] == name).unwrap()["missing"];
    assert!(
        missing("claims.json")
            .as_str()
            .unwrap()
            .contains("netconfig"),
        "{manifest:#}"
    );
    assert!(missing("metrics/netconfig.txt").is_string(), "{manifest:#}");
    for name in ["status.json", "workloads.json", "metrics/pod-events.txt"] {
        assert!(missing(name).is_null(), "{name}: {manifest:#}");
    }
    // Existing files are not changed.
    let again = host
        .inpod("bundle")
        .arg("-o")
        .arg(&output)
        .output()
        .unwrap();
    assert_eq!(again.status.code(), Some(1), "{again:?}");
}
