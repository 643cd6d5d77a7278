//! Merges the metrics of all services of the node into one text.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::future::join_all;

use super::{Metrics, RenderMetrics, fetch};

/// The timeout for all other services together. A late service counts as down.
const FETCH_TIMEOUT: Duration = Duration::from_secs(1);

const OTHERS: [&str; 4] = ["netconfig", "ztunnel-broker", "installer", "repair"];

/// The services that do not run on every node and are skipped without their directory.
const OPTIONAL: [&str; 2] = ["installer", "repair"];

/// The metrics of a service and of the node's other services, which are fetched at each scrape.
#[derive(Clone, Debug)]
pub struct AggregatedMetrics {
    name: &'static str,
    own: Metrics,
    others: [(&'static str, PathBuf); 4],
}

impl AggregatedMetrics {
    /// Aggregates a service's own metrics with those of the services below `run_dir`.
    pub fn new(name: &'static str, own: Metrics, run_dir: &Path) -> Self {
        Self {
            name,
            own,
            others: OTHERS.map(|other| (other, crate::socket(run_dir, other))),
        }
    }
}

impl RenderMetrics for AggregatedMetrics {
    async fn text(&self) -> String {
        let is_installed = |(name, socket): &&(&str, PathBuf)| {
            !OPTIONAL.contains(name) || socket.parent().is_some_and(Path::is_dir)
        };
        let others = self.others.iter().filter(is_installed);
        let fetched = join_all(others.map(async |(name, socket)| {
            let fetched = tokio::time::timeout(FETCH_TIMEOUT, fetch(socket)).await;
            let text = match fetched {
                Ok(Ok(text)) => Some(text),
                Ok(Err(error)) => {
                    tracing::debug!(component = name, error, "Cannot read metrics");
                    None
                }
                Err(_elapsed) => {
                    tracing::debug!(component = name, "Timed out reading metrics");
                    None
                }
            };
            (*name, text)
        }));
        let mut texts = vec![(self.name, Some(self.own.text()))];
        texts.extend(fetched.await);
        merge(&texts)
    }
}

/// A metric family: its metadata, declared once, and all samples.
#[derive(Default)]
struct Family<'a> {
    declared: HashSet<&'a str>,
    head: Vec<&'a str>,
    samples: Vec<&'a str>,
}

/// The families in the order of their first appearance.
#[derive(Default)]
struct Families<'a> {
    index: HashMap<&'a str, usize>,
    all: Vec<Family<'a>>,
}

impl<'a> Families<'a> {
    fn family_mut(&mut self, name: &'a str) -> Option<&mut Family<'a>> {
        let next = self.all.len();
        let at = *self.index.entry(name).or_insert(next);
        if at == next {
            self.all.push(Family::default());
        }
        self.all.get_mut(at)
    }

    /// Adds a text. The first text with a declaration of a family provides the family's metadata.
    fn add(&mut self, text: &'a str) {
        let mut current = "";
        for line in text.lines() {
            let mut fields = line.splitn(4, ' ');
            let keyword = match (fields.next(), fields.next(), fields.next()) {
                (Some("#"), Some(what @ ("HELP" | "TYPE" | "UNIT")), Some(name)) => {
                    current = name;
                    Some(what)
                }
                (Some("#"), _, _) => continue,
                (_, _, _) => None,
            };
            let Some(family) = self.family_mut(current) else {
                continue;
            };
            match keyword {
                None => family.samples.push(line),
                Some(what) if family.declared.insert(what) => family.head.push(line),
                Some(_) => {}
            }
        }
    }
}

/// Merges the texts by component. A missing or truncated text counts as a service that is down.
fn merge(texts: &[(&str, Option<String>)]) -> String {
    let mut families = Families::default();
    let mut merged = String::from(
        "# HELP inpod_component_up Whether the metrics of a component could be read.\n# TYPE inpod_component_up gauge\n",
    );
    for (component, text) in texts {
        let whole = text.as_deref().filter(|text| text.ends_with("# EOF\n"));
        let up = u8::from(whole.is_some());
        merged += &format!("inpod_component_up{{component=\"{component}\"}} {up}\n");
        families.add(whole.unwrap_or_default());
    }
    for line in families
        .all
        .iter()
        .flat_map(|family| family.head.iter().chain(&family.samples))
    {
        merged.extend([*line, "\n"]);
    }
    merged.push_str("# EOF\n");
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(component: &str) -> Option<String> {
        Some(format!(
            "# HELP process_open_fds Open file descriptors.\n\
             # TYPE process_open_fds gauge\n\
             process_open_fds{{component=\"{component}\"}} 9\n\
             # HELP inpod_{component}_ready Whether.\n\
             # TYPE inpod_{component}_ready gauge\n\
             inpod_{component}_ready 1\n\
             # EOF\n"
        ))
    }

    #[test]
    fn what_several_services_have_is_declared_once_and_counted_for_each() {
        let merged = merge(&[("a", text("a")), ("b", text("b"))]);
        let wanted = "\
            # HELP inpod_component_up Whether the metrics of a component could be read.\n\
            # TYPE inpod_component_up gauge\n\
            inpod_component_up{component=\"a\"} 1\n\
            inpod_component_up{component=\"b\"} 1\n\
            # HELP process_open_fds Open file descriptors.\n\
            # TYPE process_open_fds gauge\n\
            process_open_fds{component=\"a\"} 9\n\
            process_open_fds{component=\"b\"} 9\n\
            # HELP inpod_a_ready Whether.\n\
            # TYPE inpod_a_ready gauge\n\
            inpod_a_ready 1\n\
            # HELP inpod_b_ready Whether.\n\
            # TYPE inpod_b_ready gauge\n\
            inpod_b_ready 1\n\
            # EOF\n";
        assert_eq!(merged, wanted);
    }

    #[test]
    fn a_service_without_whole_metrics_counts_as_down() {
        let cut = text("c").unwrap().replace("# EOF\n", "");
        let merged = merge(&[("a", text("a")), ("b", None), ("c", Some(cut))]);
        for line in [
            "inpod_component_up{component=\"a\"} 1\n",
            "inpod_component_up{component=\"b\"} 0\n",
            "inpod_component_up{component=\"c\"} 0\n",
            "inpod_a_ready 1\n",
        ] {
            assert!(merged.contains(line), "{line} is not in\n{merged}");
        }
        assert!(!merged.contains("inpod_c_ready"), "{merged}");
        assert_eq!(merged.matches("# EOF").count(), 1);
    }
}
