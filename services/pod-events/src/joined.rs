//! The metrics of every service of the node as one text.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::future::join_all;
use inpod_service::{
    Daemon, Metrics,
    metrics::{AsyncText, fetch},
};

/// How long the others are waited for, together. One that is late costs its `up`, and nothing else.
const PATIENCE: Duration = Duration::from_secs(1);

/// This service's name among the others.
const OWN: &str = crate::SERVICE.name;

/// The other services of a node.
const OTHERS: [&str; 4] = ["netconfig", "ztunnel-broker", "installer", "repair"];

/// Not on every node: where their directory is not to be seen nobody misses them.
const AT_WILL: [&str; 2] = ["installer", "repair"];

/// Reads the metrics of all services when asked.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    own: Metrics,
    others: [(&'static str, PathBuf); 4],
}

impl Joined {
    pub(crate) fn new(daemon: &Daemon) -> Self {
        Self {
            own: daemon.metrics().clone(),
            others: OTHERS.map(|name| (name, inpod_service::socket(daemon.run_dir(), name))),
        }
    }
}

impl AsyncText for Joined {
    async fn text(&self) -> String {
        let is_here = |(name, socket): &&(&str, PathBuf)| {
            !AT_WILL.contains(name) || socket.parent().is_some_and(Path::is_dir)
        };
        let others = self.others.iter().filter(is_here);
        let fetched = join_all(others.map(async |(name, socket)| {
            let fetched = tokio::time::timeout(PATIENCE, fetch(socket)).await;
            let text = match fetched {
                Ok(Ok(text)) => Some(text),
                Ok(Err(error)) => {
                    tracing::debug!(component = name, error, "Cannot read metrics");
                    None
                }
                Err(_elapsed) => {
                    tracing::debug!(component = name, "Metrics did not come in time");
                    None
                }
            };
            (*name, text)
        }));
        let mut texts = vec![(OWN, Some(self.own.text()))];
        texts.extend(fetched.await);
        join(&texts)
    }
}

/// A metric family: what is said of it once, and its numbers from everywhere.
#[derive(Default)]
struct Family<'a> {
    said: HashSet<&'a str>,
    head: Vec<&'a str>,
    samples: Vec<&'a str>,
}

/// The families of several texts, in the order in which they were first seen.
#[derive(Default)]
struct Families<'a> {
    index: HashMap<&'a str, usize>,
    all: Vec<Family<'a>>,
}

impl<'a> Families<'a> {
    fn of(&mut self, name: &'a str) -> Option<&mut Family<'a>> {
        let next = self.all.len();
        let at = *self.index.entry(name).or_insert(next);
        if at == next {
            self.all.push(Family::default());
        }
        self.all.get_mut(at)
    }

    /// Takes a whole text in. What a family is, the first text says that has it.
    fn take(&mut self, text: &'a str) {
        let mut current = "";
        for line in text.lines() {
            let mut words = line.splitn(4, ' ');
            let told = match (words.next(), words.next(), words.next()) {
                (Some("#"), Some(what @ ("HELP" | "TYPE" | "UNIT")), Some(name)) => {
                    current = name;
                    Some(what)
                }
                (Some("#"), _, _) => continue,
                (_, _, _) => None,
            };
            let Some(family) = self.of(current) else {
                continue;
            };
            match told {
                None => family.samples.push(line),
                Some(what) if family.said.insert(what) => family.head.push(line),
                Some(_) => {}
            }
        }
    }
}

/// One text of several, each with its component's name; a text that is missing or has no end is of one that is away.
fn join(texts: &[(&str, Option<String>)]) -> String {
    let mut families = Families::default();
    let mut joined = String::from(
        "# HELP up Whether the metrics of a component could be read.\n# TYPE up gauge\n",
    );
    for (component, text) in texts {
        let whole = text.as_deref().filter(|text| text.ends_with("# EOF\n"));
        let up = u8::from(whole.is_some());
        // Writing into a string does not fail.
        writeln!(joined, "up{{component=\"{component}\"}} {up}").unwrap_or_default();
        families.take(whole.unwrap_or_default());
    }
    for line in families
        .all
        .iter()
        .flat_map(|family| family.head.iter().chain(&family.samples))
    {
        joined.push_str(line);
        joined.push('\n');
    }
    joined.push_str("# EOF\n");
    joined
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
        let joined = join(&[("a", text("a")), ("b", text("b"))]);
        let wanted = "\
            # HELP up Whether the metrics of a component could be read.\n\
            # TYPE up gauge\n\
            up{component=\"a\"} 1\n\
            up{component=\"b\"} 1\n\
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
        assert_eq!(joined, wanted);
    }

    #[test]
    fn one_that_is_away_or_was_cut_short_costs_its_up_and_nothing_else() {
        let cut = text("c").unwrap().replace("# EOF\n", "");
        let joined = join(&[("a", text("a")), ("b", None), ("c", Some(cut))]);
        for line in [
            "up{component=\"a\"} 1\n",
            "up{component=\"b\"} 0\n",
            "up{component=\"c\"} 0\n",
            "inpod_a_ready 1\n",
        ] {
            assert!(joined.contains(line), "{line} is not in\n{joined}");
        }
        assert!(!joined.contains("inpod_c_ready"), "{joined}");
        assert_eq!(joined.matches("# EOF").count(), 1);
    }
}
