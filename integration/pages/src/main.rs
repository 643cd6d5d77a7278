//! Writes the tables of the pages that follow from the code: settings, metrics, reasons, scopes of the log, and load.
//!
//! Each table follows a mark, `<!-- NAME: written by integration/pages -->`, and ends at the first empty line.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use clap::{Arg, ArgAction, Command};
use inpod_service::{Key, config::COMMON};
use inpod_types::Reason;
use pod_events::{counters::Metric, metrics::OWN};

fn main() -> anyhow::Result<()> {
    let check = Arg::new("check")
        .long("check")
        .action(ArgAction::SetTrue)
        .help("Write nothing; name the pages whose tables differ, and fail");
    let matches = Command::new("pages")
        .about("Writes the tables of the pages that follow from the code.")
        .version(env!("CARGO_PKG_VERSION"))
        .arg(check)
        .get_matches();
    let is_check = matches.get_flag("check");
    let mut outdated = Vec::new();
    for (page, name, table) in [
        ("deploy/docs/settings.md", "settings", settings()),
        ("deploy/docs/troubleshooting.md", "reasons", reasons()),
        ("deploy/docs/troubleshooting.md", "scopes", scopes()?),
        ("deploy/docs/scale.md", "load", load()?),
        ("services/docs/architecture.md", "metrics", metrics()),
    ] {
        let path = root().join(page);
        let text = fs::read_to_string(&path).with_context(|| page.to_owned())?;
        let wanted = with_table(&text, name, &table)
            .with_context(|| format!("{page} has no table after the mark {name}"))?;
        if text == wanted {
            continue;
        }
        if is_check {
            outdated.push(page);
        } else {
            fs::write(&path, wanted)?;
        }
    }
    if !outdated.is_empty() {
        bail!(
            "tables differ from the code in {}: run `cargo run -p pages`",
            outdated.join(", ")
        );
    }
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Replaces the table after the mark in a page, or returns `None` if the page has no such mark.
fn with_table(page: &str, name: &str, table: &str) -> Option<String> {
    let mark = format!("<!-- {name}: written by integration/pages -->\n");
    let (before, rest) = page.split_once(&mark)?;
    let (_, after) = rest.split_at(rest.find("\n\n")? + 1);
    Some(format!("{before}{mark}{table}{after}"))
}

fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in rows {
        // Writing to a string cannot fail.
        writeln!(table, "| {} |", row.join(" | ")).unwrap_or_default();
    }
    table
}

fn settings() -> String {
    let services = [
        ("all", COMMON),
        ("pod-events", pod_events::SERVICE.keys),
        ("netconfig", netconfig::SERVICE.keys),
        ("ztunnel-broker", ztunnel_broker::SERVICE.keys),
        ("installer", installer::SERVICE.keys),
        ("repair", repair::SERVICE.keys),
        ("injector", injector::SERVICE.keys),
    ];
    let row = |service: &str, key: &Key| {
        let default = match key.default {
            None => "required".to_owned(),
            Some("") => "(none)".to_owned(),
            Some(default) => format!("`{default}`"),
        };
        let name = format!("`{}`", key.name);
        vec![service.to_owned(), name, default, key.help.to_owned()]
    };
    let rows = services
        .into_iter()
        .flat_map(|(service, keys)| keys.iter().map(move |key| row(service, key)));
    table(&["Service", "Setting", "Default", "Meaning"], rows)
}

fn metrics() -> String {
    let row = |(metric, ending): &(Metric, &str)| {
        let labels = if metric.labels.is_empty() {
            "-"
        } else {
            metric.labels
        };
        vec![
            format!("`inpod_pod_events_{}{ending}`", metric.name),
            labels.to_owned(),
            format!("{}.", metric.help),
        ]
    };
    table(&["Metric", "Labels", "What it counts"], OWN.iter().map(row))
}

fn reasons() -> String {
    let row = |reason: &Reason| vec![format!("`{}`", reason.name()), reason.remedy().to_owned()];
    table(&["Reason", "What to do"], Reason::ALL.iter().map(row))
}

/// Lists the logging modules, with the first sentence of the documentation.
fn scopes() -> anyhow::Result<String> {
    let mut rows = Vec::new();
    for service in [
        "pod-events",
        "netconfig",
        "ztunnel-broker",
        "installer",
        "repair",
        "injector",
    ] {
        let sources = root().join("services").join(service).join("src");
        for file in files(&sources)? {
            let code = fs::read_to_string(&file)?;
            let module = file.file_stem().context("a file has a name")?;
            let module = module.to_string_lossy();
            let purpose = purpose(&code);
            if purpose.is_empty() || module == "lib" || !does_log(&file)? {
                continue;
            }
            let scope = format!("`{}::{module}`", service.replace('-', "_"));
            rows.push(vec![service.to_owned(), scope, purpose]);
        }
    }
    for (scope, purpose) in [
        ("inpod_service", "Settings, sockets, callers and calls."),
        (
            "inpod_cni",
            "Calls of the plugin that pod-events has not answered.",
        ),
        ("kube", "The client of the API server."),
        ("h2", "HTTP/2 connections."),
    ] {
        let scope = format!("`{scope}`");
        rows.push(vec!["all".to_owned(), scope, purpose.to_owned()]);
    }
    Ok(table(&["Service", "Scope", "What it does"], rows))
}

/// Returns the Rust files of a directory in alphabetical order; none if there is no such directory.
fn files(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<anyhow::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|it| it == "rs"));
    paths.sort();
    Ok(paths)
}

/// Returns whether a module or one of its submodules writes lines.
fn does_log(file: &Path) -> anyhow::Result<bool> {
    let code = fs::read_to_string(file)?;
    let writes = ["info", "warn", "error", "debug", "event"];
    if writes
        .iter()
        .any(|macro_| code.contains(&format!("tracing::{macro_}!(")))
    {
        return Ok(true);
    }
    for submodule in files(&file.with_extension(""))? {
        if does_log(&submodule)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the first sentence of a module's documentation, without links.
fn purpose(code: &str) -> String {
    let lines = code.lines().map_while(|line| line.strip_prefix("//!"));
    let text = lines.take_while(|line| !line.is_empty());
    let text: Vec<_> = text.map(str::trim).collect();
    let text = text.join(" ").replace(['[', ']'], "");
    match text.split_once(". ") {
        Some((sentence, _)) => format!("{sentence}."),
        None => text,
    }
}

/// Computes the load of the agents on the API server from how pod-events lists and watches.
fn load() -> anyhow::Result<String> {
    let lasts = declared("WATCH_SECONDS")?;
    // A watch ends up to a quarter earlier than its limit; the difference is distributed uniformly.
    let mean = f64::from(lasts) - f64::from(lasts / 4 - 1) / 2.0;
    let row = |(nodes, namespaces): (u32, u32)| {
        let watches = 2 * nodes;
        let rest = f64::from(watches) / mean;
        // A list and a watch for pods, and the same for namespaces.
        let start = 4;
        let cells = [nodes, namespaces, watches].map(|number| number.to_string());
        let others = [start, nodes * start, nodes].map(|number| number.to_string());
        let cells = cells.into_iter().chain([format!("{rest:.0}")]);
        cells.chain(others).collect()
    };
    let head = [
        "Nodes",
        "Namespaces",
        "Open watches",
        "Requests/s at rest",
        "Requests per agent start",
        "Requests, all agents starting",
        "Messages per namespace change",
    ];
    let sizes = [(100, 100), (1_000, 1_000), (5_000, 10_000)];
    Ok(table(&head, sizes.map(row)))
}

/// Returns a number that the list and watch of pod-events declares.
fn declared(name: &str) -> anyhow::Result<u32> {
    let file = "services/pod-events/src/source/kubernetes/list_watch.rs";
    let code = fs::read_to_string(root().join(file))?;
    let after = code.split_once(&format!("const {name}: u32 = "));
    let (number, _) = after
        .and_then(|(_, rest)| rest.split_once(';'))
        .with_context(|| format!("{file} declares no {name}"))?;
    Ok(number.parse()?)
}
