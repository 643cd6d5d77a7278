//! The rules of every scenario, as recorded. `UPDATE_GOLDEN=1` records them anew.

use std::{fs, path::Path};

use netconfig::rules::Redirection;

const SCENARIOS: [(&str, Redirection); 1] = [("ambient", Redirection::Ambient)];

#[test]
fn every_scenario_renders_as_recorded() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, redirection) in SCENARIOS {
        let path = directory.join(format!("{name}.nft"));
        let rendered = redirection.ruleset().to_string();
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

/// A fingerprint that moves rewrites the rules of every pod of a node at an upgrade: that must be on purpose.
#[test]
fn the_fingerprint_of_the_ambient_rules_has_not_moved() {
    let fingerprint = Redirection::Ambient.ruleset().fingerprint();
    assert_eq!(fingerprint.to_string(), "3717c2e820bb1348");
}
