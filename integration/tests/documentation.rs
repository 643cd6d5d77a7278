//! What the pages say, compared with the code. `UPDATE_DOCS=1` writes the generated parts.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use daemon::{Key, config::COMMON};
use pod_events::metrics::{Metric, OF_ISTIO, OWN};
use workload::keys;

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
    for key in keys::TABLE {
        let keys::Key {
            name,
            on,
            access,
            by,
            values,
            does,
        } = key;
        let (on, access) = (on.words(), access.words());
        writeln!(
            table,
            "| `{name}` | {on} | {access} by {by} | {values} | {does} |"
        )
        .unwrap();
    }
    table
}

/// Compares the table that follows a mark in a page, or writes it.
#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to rewrite the page"
)]
fn compare(page: &str, mark: &str, table: &str) {
    // Two tests of one process write the same page.
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
fn the_readme_lists_every_setting_with_its_default() {
    compare("README.md", SETTINGS, &table());
}

#[test]
fn the_readme_lists_every_label_and_annotation() {
    compare("README.md", KEYS, &keys_table());
}

#[test]
fn every_metric_of_pod_events_is_listed_with_its_labels() {
    compare("services/README.md", METRICS_MARK, &metrics_table());
}

/// Every relative link of every page.
fn links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    targets
        .filter(|target| !target.contains("://"))
        .map(|target| target.split('#').next().unwrap())
}

#[test]
fn every_page_leads_to_what_is_there() {
    for page in [
        "README.md",
        "services/README.md",
        "services/DECISIONS.md",
        "services/netconfig/README.md",
        "proto/README.md",
        "proto/istio/workload/zds/README.md",
        "deploy/README.md",
        "deploy/CHANGELOG.md",
        "integration/README.md",
        "integration/bench/README.md",
    ] {
        let path = root().join(page);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
        for link in links(&text) {
            assert!(
                path.parent().unwrap().join(link).exists(),
                "{page} leads to {link}"
            );
        }
    }
}

#[test]
fn decisions_are_numbered_without_a_gap() {
    let page = fs::read_to_string(root().join("services/DECISIONS.md")).unwrap();
    let numbers = page.lines().filter_map(|line| {
        line.strip_prefix("## ")?
            .split('.')
            .next()?
            .parse::<usize>()
            .ok()
    });
    assert!(
        numbers
            .enumerate()
            .all(|(index, number)| number == index + 1)
    );
}
