//! Rules of every scenario, as recorded for each backend. `UPDATE_GOLDEN=1` records them again.

use std::{
    fs,
    path::{Path, PathBuf},
};

use netconfig::{
    Family, iptables_script,
    rules::{Redirection, scenarios},
};

fn path(scenario: &str, extension: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    directory.join(format!("{scenario}.{extension}"))
}

/// Empty output has no file.
fn compare(extension: &str, render: impl Fn(&Redirection) -> String) {
    for (name, redirection) in scenarios::redirections() {
        let path = path(&name, extension);
        let rendered = render(&redirection);
        if std::env::var_os("UPDATE_GOLDEN").is_some() && !rendered.is_empty() {
            fs::write(&path, &rendered).unwrap();
        }
        let recorded = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            rendered, recorded,
            "{name}: UPDATE_GOLDEN=1 records it anew"
        );
    }
}

#[test]
fn every_scenario_renders_as_recorded() {
    compare("nft", |redirection| redirection.ruleset().to_string());
}

#[test]
fn every_scenario_renders_for_iptables_as_recorded() {
    for (extension, family) in [("iptables", Family::V4), ("ip6tables", Family::V6)] {
        compare(extension, |redirection| {
            iptables_script(&redirection.ruleset(), family, "inpod")
        });
    }
}

#[test]
fn no_recorded_script_is_of_no_scenario() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let mut names = scenarios::redirections().map(|(name, _)| name);
        assert!(names.any(|name| name == stem), "{}", path.display());
    }
}
