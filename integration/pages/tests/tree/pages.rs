//! The pages' tables of permissions, and the paragraphs of alerts.

use std::collections::BTreeSet;

use crate::{monitoring::alerts, read, table::RIGHTS, text};

const SECURITY: &str = "deploy/docs/security.md";
const MONITORING: &str = "deploy/docs/monitoring.md";

fn rows(page: &str, heading: &str) -> Vec<Vec<String>> {
    let text = read(page);
    let after = text.split(&format!("\n## {heading}\n")).nth(1);
    let section = after.unwrap_or_else(|| panic!("{page} has no section {heading}"));
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| "));
    let cells = |line: &str| {
        line.trim_matches('|')
            .split(" | ")
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    lines.skip(1).map(cells).collect()
}

fn quoted(text: &str) -> BTreeSet<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn capabilities(container: &str) -> BTreeSet<String> {
    let mut all = RIGHTS.iter();
    let rights = all.find(|rights| rights.container == container).unwrap();
    rights
        .capabilities
        .iter()
        .map(|name| (*name).to_owned())
        .collect()
}

#[test]
fn the_page_gives_each_process_the_rights_of_the_table() {
    let rows = rows(SECURITY, "Processes and their rights");
    for rights in &RIGHTS {
        let name = format!("`{}`", rights.container);
        let row = rows.iter().find(|row| row[0] == name);
        let row = row.unwrap_or_else(|| panic!("{name} has no row"));
        assert_eq!(quoted(&row[2]), capabilities(rights.container), "{name}");
        assert_eq!(row[1] == "none", !rights.has_token, "{name}");
    }
}

#[test]
fn the_page_names_a_call_for_each_capability() {
    let rows = rows(SECURITY, "Rights per container");
    let mut container = String::new();
    let mut found = Vec::new();
    for row in rows {
        if !row[0].is_empty() {
            container = quoted(&row[0]).into_iter().next().unwrap();
        }
        assert!(!row[2].is_empty(), "{row:?}");
        found.extend(
            quoted(&row[1])
                .into_iter()
                .map(|name| (container.clone(), name)),
        );
    }
    let table = RIGHTS.iter().flat_map(|rights| {
        let names = capabilities(rights.container).into_iter();
        names.map(|name| (rights.container.to_owned(), name))
    });
    let found: BTreeSet<_> = found.into_iter().collect();
    assert_eq!(found, table.collect());
}

#[test]
fn the_page_names_every_path_of_the_node_that_a_container_is_given() {
    let rows = rows(SECURITY, "Paths of the node");
    for rights in &RIGHTS {
        let of: BTreeSet<_> = rows
            .iter()
            .filter(|row| quoted(&row[1]).contains(rights.container))
            .flat_map(|row| quoted(&row[0]))
            .collect();
        for (place, _) in rights.mounts {
            let place = place.trim_start_matches("/host");
            let place = match place {
                "CONF" => "cniConfDir",
                "BIN" => "cniBinDir",
                "RUNTIME" => "runtimeConfigDir",
                "NETNS" => "cniNetnsDir",
                path => path,
            };
            assert!(
                of.contains(place),
                "{} has {place}, which the page does not say",
                rights.container
            );
        }
        assert_eq!(of.len(), rights.mounts.len(), "{}", rights.container);
    }
}

#[test]
fn every_alert_has_its_paragraph() {
    let page = read(MONITORING);
    for alert in alerts() {
        let name = text(&alert, "/alert");
        assert!(page.contains(&format!("\n### {name}\n")), "{name}");
    }
}
