//! A bundle's content, and the secrets that it omits.

use std::{collections::BTreeSet, fs, path::Path};

use integration::{Spec, run};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::alone::doctor::Host;

/// A token in Kubernetes' form, and another.
const TOKEN: &str = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.cGxhbnRlZC1zaWduYXR1cmU";
const SECRET: &str = "planted-hunter2";

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

fn plant(host: &Host) -> std::path::PathBuf {
    let conflist = crate::alone::doctor::CHAIN.replace(
        r#"{"type":"bridge"}"#,
        &format!(r#"{{"type":"bridge","token":"{SECRET}","annotations":{{"note":"{SECRET}"}},"args":"Bearer {TOKEN}"}}"#),
    );
    fs::write(host.conf.join("10-podnet.conflist"), conflist).unwrap();
    let log = host.conf.with_file_name("planted.log");
    let lines = format!(
        "2026-01-01T00:00:00Z stdout F {{\"level\":\"INFO\",\"annotations\":{{\"team/note\":\"{SECRET}\"}}}}\n\
         asked with Authorization: Bearer {TOKEN}\nkept line\n"
    );
    fs::write(&log, lines).unwrap();
    log
}

/// Unpacks an archive with the system's tar.
fn unpacked(archive: &Path) -> Vec<(String, String)> {
    let directory = archive.with_file_name("unpacked");
    fs::create_dir(&directory).unwrap();
    let [archive, into] = [archive, &directory].map(|path| path.to_str().unwrap());
    run("tar", &["-xf", archive, "-C", into]).unwrap();
    files(&directory.join("inpod-bundle"))
}

#[test]
fn a_bundle_has_everything_but_secrets() {
    let host = Host::new();
    let spec = Spec::new("web").ambient().annotate("team/note", SECRET);
    let spec = spec
        .annotate("other", TOKEN)
        .annotate("inpod.io/exclude-outbound-ports", TOKEN);
    host.node.pod(spec).unwrap();
    let log = plant(&host);
    let output = host.conf.with_file_name("bundle.tar");
    let mut command = host.inpod("bundle");
    command.arg("-o").arg(&output).arg("--log").arg(&log);
    let said = command.output().unwrap();
    assert!(said.status.success(), "{said:?}");
    let files = unpacked(&output);
    for (name, text) in &files {
        assert!(
            !text.contains(SECRET) && !text.contains(TOKEN),
            "{name}: {text}"
        );
    }
    let text = |name: &str| {
        let found = files.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("{name} is missing")).1
    };
    assert!(text("logs/planted.log").contains("kept line"));
    assert!(text("cni/10-podnet.conflist").contains("inpod-cni"));
    assert!(text("pods/000-shop_web.json").contains("ENROLLMENT_AMBIENT"));
    assert!(text("metrics/netconfig.txt").contains("inpod_netconfig_build_info"));
    assert!(text("workloads.json").contains("WORKLOAD_PHASE_ADDED"));
    assert!(text("services/pod-events.txt").contains("--node-name"));
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
    let output = host.conf.with_file_name("bundle");
    let said = host
        .inpod("bundle")
        .arg("-o")
        .arg(&output)
        .arg("--redact-addresses")
        .output()
        .unwrap();
    assert!(said.status.success(), "{said:?}");
    let manifest: Value =
        serde_json::from_str(&fs::read_to_string(output.join("manifest.json")).unwrap()).unwrap();
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
