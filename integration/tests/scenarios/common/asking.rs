//! The metrics of sockets and of the port, queried by curl.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use integration::{Node, run};

pub(crate) fn scrape(node: &Node, service: &str) -> anyhow::Result<String> {
    let socket = inpod_service::socket(&node.run_dir(), service);
    let socket = socket.to_str().context("a path of text")?;
    let url = "http://localhost/metrics";
    let text = run("curl", &["-sSf", "--unix-socket", socket, url])?;
    check(&text).with_context(|| format!("{service} says\n{text}"))?;
    Ok(text)
}

pub(crate) fn scrape_all(node: &Node) -> anyhow::Result<String> {
    let netns = format!("--net={}", node.netns().path().display());
    let url = "http://127.0.0.1:15014/metrics";
    let text = run("nsenter", &[&netns, "curl", "-sSf", "-m", "5", url])?;
    check(&text).with_context(|| format!("all say\n{text}"))?;
    Ok(text)
}

/// Returns the value of a series, written as in the text.
pub(crate) fn number(text: &str, series: &str) -> Option<f64> {
    let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value)
}

/// OpenMetrics: each family declared once and in one piece, no series twice, one end.
fn check(text: &str) -> anyhow::Result<()> {
    let (mut families, mut declared, mut series) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut family = "";
    let body = text
        .strip_suffix("# EOF\n")
        .context("it has no end of its own")?;
    for line in body.lines() {
        if let Some(said) = line.strip_prefix("# ") {
            let mut words = said.split(' ');
            let (what, name) = (words.next(), words.next().context("a family's name")?);
            ensure!(declared.insert((what, name)), "{line} is said twice");
            if name != family {
                ensure!(families.insert(name), "{name} is told in two pieces");
                family = name;
            }
        } else {
            let (name, value) = line.rsplit_once(' ').context("a series and a value")?;
            ensure!(name.starts_with(family), "{name} is not of {family}");
            ensure!(series.insert(name), "{name} is told twice");
            value.parse::<f64>().with_context(|| line.to_owned())?;
        }
    }
    Ok(())
}
