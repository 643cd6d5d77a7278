//! Compares pages with code. `UPDATE_DOCS=1` writes the generated parts.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that fails panics"
)]

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::Path,
    process::Command,
    sync::{Mutex, PoisonError},
};

use inpod_service::{Key, config::COMMON};
use inpod_types::keys;
use pod_events::{
    counters::Metric,
    metrics::{OF_ISTIO, OWN},
};

const SETTINGS: &str =
    "<!-- settings: integration/tests/documentation.rs compares this table with the code -->\n";

const KEYS: &str =
    "<!-- keys: integration/tests/documentation.rs compares this table with the code -->\n";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn row(service: &str, key: &Key) -> String {
    let default = key.default.map_or_else(
        || "required".to_owned(),
        |default| {
            if default.is_empty() {
                "(none)".to_owned()
            } else {
                format!("`{default}`")
            }
        },
    );
    format!(
        "| {service} | `{}` | {default} | {} |\n",
        key.name, key.help
    )
}

const METRICS_MARK: &str =
    "<!-- metrics: integration/tests/documentation.rs compares this table with the code -->\n";

fn metrics_table() -> String {
    let mut table = "| Metric | Labels | What it counts |\n|---|---|---|\n".to_owned();
    let mut row = |prefix: &str, ending: &str, metric: &Metric, when: &str| {
        let labels = Some(metric.labels).filter(|labels| !labels.is_empty());
        let (name, labels, help) = (metric.name, labels.unwrap_or("-"), metric.help);
        writeln!(
            table,
            "| `{prefix}{name}{ending}` | {labels} | {help}{when}. |"
        )
        .unwrap();
    };
    for (metric, ending) in OWN {
        row("inpod_pod_events_", ending, metric, "");
    }
    for (metric, ending) in OF_ISTIO {
        row("", ending, metric, ". Only with `istio_metrics`");
    }
    table
}

fn table() -> String {
    let mut table = "| Service | Setting | Default | Meaning |\n|---|---|---|---|\n".to_owned();
    let services = [
        ("all", COMMON),
        ("pod-events", pod_events::SERVICE.keys),
        ("netconfig", netconfig::SERVICE.keys),
        ("ztunnel-broker", ztunnel_broker::SERVICE.keys),
        ("installer", installer::SERVICE.keys),
        ("repair", repair::SERVICE.keys),
        ("injector", injector::SERVICE.keys),
    ];
    for (service, keys) in services {
        keys.iter()
            .for_each(|key| write!(table, "{}", row(service, key)).unwrap());
    }
    table
}

fn keys_table() -> String {
    let mut table =
        "| Label or annotation | On | inpod | Holds | What it does |\n|---|---|---|---|---|\n"
            .to_owned();
    for key in keys::table() {
        let keys::Key {
            name,
            location,
            access,
            by,
            values,
            does,
        } = key;
        let (on, access) = (location.describe(), access.describe());
        writeln!(
            table,
            "| `{name}` | {on} | {access} by {by} | {values} | {does} |"
        )
        .unwrap();
    }
    table
}

/// Compares or writes the table after a mark.
#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to rewrite the page"
)]
fn compare(page: &str, mark: &str, table: &str) {
    // Two tests write the same page.
    static PAGE: Mutex<()> = Mutex::new(());
    let _turn = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = root().join(page);
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(mark).unwrap();
    let end = rest.find("\n\n").unwrap() + 1;
    let (written, after) = rest.split_at(end);
    if std::env::var("UPDATE_DOCS").is_ok() {
        fs::write(&path, format!("{before}{mark}{table}{after}")).unwrap();
        return;
    }
    assert_eq!(
        written, table,
        "UPDATE_DOCS=1 cargo test -p integration --test documentation"
    );
}

#[test]
fn the_page_of_settings_lists_each_with_its_default() {
    compare("deploy/docs/settings.md", SETTINGS, &table());
}

#[test]
fn the_page_of_labels_lists_each_label_and_annotation() {
    compare("deploy/docs/labels.md", KEYS, &keys_table());
}

#[test]
fn every_metric_of_pod_events_is_listed_with_its_labels() {
    compare(
        "services/docs/architecture.md",
        METRICS_MARK,
        &metrics_table(),
    );
}

fn links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

fn pages() -> Vec<String> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "*.md"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(git.status.success());
    let names = String::from_utf8(git.stdout).unwrap();
    names.split_terminator('\0').map(str::to_owned).collect()
}

fn anchor(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || "-_ ".contains(*letter);
    let text: String = heading.to_lowercase().chars().filter(kept).collect();
    text.trim().replace(' ', "-")
}

#[test]
fn every_link_of_every_page_leads_to_a_file_and_a_heading() {
    let pages = pages();
    assert!(pages.len() > 20, "{pages:?}");
    for page in pages {
        let path = root().join(&page);
        let text = fs::read_to_string(&path).unwrap();
        for link in links(&text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let file = if file.is_empty() {
                path.clone()
            } else {
                path.parent().unwrap().join(file)
            };
            assert!(file.exists(), "{page} leads to {link}");
            if heading.is_empty() {
                continue;
            }
            let target = fs::read_to_string(&file).unwrap();
            let headings = target.lines().filter(|line| line.starts_with('#'));
            let mut anchors = headings.map(|line| anchor(line.trim_start_matches('#')));
            assert!(
                anchors.any(|anchor| anchor == heading),
                "{page} leads to {link}, which is no heading"
            );
        }
    }
}

/// Istio's quirks of redirection and its repair, of the 24 in services/docs/facts/istio-sidecar.md, 12. The others
/// concern the installer, ambient mode or the injector.
const QUIRKS: [&str; 15] = [
    "1", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "22", "23", "24",
];

#[test]
fn every_quirk_of_sidecars_is_kept_or_fixed_with_a_reason() {
    let page = fs::read_to_string(root().join("services/docs/sidecars.md")).unwrap();
    let rows = page.lines().filter_map(|line| {
        let cells: Vec<_> = line
            .split(" | ")
            .map(|it| it.trim_matches(['|', ' ']))
            .collect();
        <[&str; 4]>::try_from(cells).ok()
    });
    let rows: Vec<_> = rows.filter(|[number, ..]| *number != "#").collect();
    let numbers: Vec<_> = rows.iter().map(|[number, ..]| *number).collect();
    let numbers: Vec<_> = numbers.into_iter().filter(|it| *it != "-").collect();
    assert_eq!(numbers, QUIRKS);
    for [number, quirk, here, why] in rows {
        let is_decided = ["kept", "fixed"].iter().any(|it| here.starts_with(it));
        assert!(
            is_decided && !quirk.is_empty() && !why.is_empty(),
            "{number}: {quirk}"
        );
    }
}

#[test]
fn decisions_are_numbered_without_a_gap() {
    let directory = root().join("services/docs/decisions");
    let index = fs::read_to_string(directory.join("README.md")).unwrap();
    let mut rows = index.lines().filter(|line| line.starts_with("| ["));
    let entries = fs::read_dir(&directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let decisions: BTreeSet<_> = names.filter(|name| name != "README.md").collect();
    for (number, name) in (1..).zip(&decisions) {
        assert!(
            name.starts_with(&format!("{number:03}-")),
            "{name} is in the place of decision {number}"
        );
        let text = fs::read_to_string(directory.join(name)).unwrap();
        let mut lines = text.lines().filter(|line| !line.is_empty());
        let title = lines.next().unwrap();
        let title = title.strip_prefix(&format!("# {number}. "));
        let title = title.unwrap_or_else(|| panic!("{name} has no title"));
        let status = lines.next().unwrap().strip_prefix("Status: ").unwrap();
        if status != "accepted" {
            let successor = status.strip_prefix("superseded by [").unwrap();
            let (successor, link) = successor.split_once("](").unwrap();
            let link = link.strip_suffix(')').unwrap();
            assert!(
                link.starts_with(&format!("{successor}-")) && decisions.contains(link),
                "{name} is superseded by {link}"
            );
        }
        let headings = lines.filter_map(|line| line.strip_prefix("## "));
        assert!(
            headings.eq(["Context", "Decision", "Consequences"]),
            "{name} has other headings"
        );
        let row = format!("| [{number:03}]({name}) | {title} | {status} |");
        assert_eq!(rows.next(), Some(row.as_str()), "README.md of decisions");
    }
    assert_eq!(rows.next(), None, "README.md of decisions");
}

fn quoted(row: &str) -> impl Iterator<Item = &str> {
    row.split('`').skip(1).step_by(2)
}

fn tests_of(text: &str) -> impl Iterator<Item = &str> {
    let is_test = |line: &&str| line.starts_with("#[test]") || line.starts_with("#[tokio::test");
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let mut tests = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let name = line.trim_start_matches("async ").strip_prefix("fn ");
        let Some(name) = name.and_then(|rest| rest.split('(').next()) else {
            continue;
        };
        let above = lines[..number].iter().rev();
        let mut attributes = above.take_while(|line| line.starts_with("#["));
        if attributes.any(is_test) {
            tests.push(name);
        }
    }
    tests.into_iter()
}

#[test]
fn every_scenario_is_a_test_of_the_file_that_is_named() {
    let page = fs::read_to_string(root().join("integration/SCENARIOS.md")).unwrap();
    let mut scenarios = BTreeSet::new();
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let mut file = None;
        for name in quoted(row) {
            if name.contains('/') {
                let text = fs::read_to_string(root().join(name));
                let text = text.unwrap_or_else(|error| panic!("{name}: {error}"));
                file = Some((name, text));
                continue;
            }
            let (path, text) = file
                .as_ref()
                .unwrap_or_else(|| panic!("{name} has no file"));
            assert!(
                tests_of(text).any(|test| test == name),
                "{name} is no test of {path}"
            );
            scenarios.insert((*path, name.to_owned()));
        }
    }
    let of_the_api_server = |(path, _): &&(&str, String)| path.contains("/kubernetes");
    let count = scenarios.iter().filter(of_the_api_server).count();
    assert!(count >= 60, "{count} scenarios against the real API server");
}

#[test]
fn every_row_of_the_scenarios_names_a_test() {
    let page = fs::read_to_string(root().join("integration/SCENARIOS.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let heads = ["| Area |", "| Report |", "| Scenario |"];
    let rows: Vec<_> = rows
        .filter(|row| !heads.iter().any(|head| row.starts_with(head)))
        .collect();
    for row in &rows {
        assert!(quoted(row).count() > 1, "{row}");
    }
    let firsts = |row: &&str| row.split(" | ").next().unwrap()[2..].to_owned();
    let firsts: Vec<_> = rows.iter().map(firsts).collect();
    // Reports of services/docs/facts/demands.md, 3; areas of Istio's tests of which each line is
    // a scenario (services/docs/facts/istio-ambient.md, 10).
    let reports = [1, 2, 3, 4, 5, 6, 7, 24, 35, 46, 50, 57, 68].map(|number| number.to_string());
    let areas = ["selectors", "informers", "dataplane", "event server"].map(str::to_owned);
    for wanted in reports.iter().chain(&areas) {
        assert!(firsts.contains(wanted), "{wanted} has no row");
    }
}
