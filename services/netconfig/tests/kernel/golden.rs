//! Rules of every scenario, as recorded. `UPDATE_GOLDEN=1` records them again.

use std::{fs, path::Path};

use crate::scenarios;

#[test]
fn every_scenario_renders_as_recorded() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    for (name, redirection) in scenarios::redirections() {
        let path = directory.join(format!("{name}.nft"));
        let rendered = redirection.ruleset().to_string();
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
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
fn no_recorded_script_is_of_no_scenario() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let mut names = scenarios::redirections().map(|(name, _)| name);
        assert!(names.any(|name| name == stem), "{}", path.display());
    }
}
