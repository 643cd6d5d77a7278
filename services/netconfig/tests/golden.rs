//! The rules of every scenario, as recorded. `UPDATE_GOLDEN=1` records them anew.

use std::{fs, path::Path};

use netconfig::rules::{Redirection, scenarios};

#[test]
fn every_scenario_renders_as_recorded() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, settings) in scenarios::all() {
        let path = directory.join(format!("{name}.nft"));
        let rendered = Redirection::Ambient(settings).ruleset().to_string();
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, &rendered).unwrap();
        }
        let recorded = fs::read_to_string(&path).unwrap();
        assert_eq!(
            rendered, recorded,
            "{name}: UPDATE_GOLDEN=1 records it anew"
        );
    }
}
