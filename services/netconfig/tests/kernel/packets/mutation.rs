//! Without any rule, a check fails.

use std::collections::BTreeSet;

use netconfig::{
    Family,
    rules::{Ambient, Ipv6, Redirection},
};

use crate::packets::{
    checks::checks,
    matrix::{MAX_PODS, all, run_all, run_all_once, scenario},
    probe::at_once,
    world::{Pod, World},
};
use crate::scenarios;

/// Scenarios with the most rules first. Unless all are tried, the others contribute only new rules.
const RICHEST: [&str; 1] = ["everything"];

/// A part of a redirection, described.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Rule {
        table: String,
        chain: String,
        at: usize,
        text: String,
    },
    /// Arguments of the command that deletes it.
    Route(String),
}

impl Part {
    /// Equal for equal rules, wherever they are.
    pub(crate) fn what(&self) -> String {
        match self {
            Self::Rule {
                table, chain, text, ..
            } => format!("{table} {chain}: {text}"),
            Self::Route(command) => command.clone(),
        }
    }

    /// Returns whether the rule guards ztunnel's ports.
    pub(crate) fn is_guard(&self) -> bool {
        matches!(self, Self::Rule { chain, .. } if chain == "input")
    }

    /// Returns whether the rule only counts, so that no packet goes elsewhere without the rule.
    fn only_counts(&self) -> bool {
        matches!(self, Self::Rule { text, .. } if text.ends_with(" counter"))
    }

    pub(crate) fn delete(&self, world: &World) {
        match self {
            Self::Rule {
                table, chain, at, ..
            } => {
                let listed = world
                    .pod
                    .command("nft", &["-a", "list", "chain", "inet", table, chain]);
                let base = "type ";
                let rules = listed
                    .lines()
                    .filter(|line| line.starts_with("\t\t") && !line.trim().starts_with(base));
                let handle = rules
                    .map(|line| line.rsplit(' ').next().unwrap())
                    .nth(*at)
                    .unwrap();
                world
                    .pod
                    .nft(&format!("delete rule inet {table} {chain} handle {handle}"));
            }
            Self::Route(command) => drop(world.pod.ip(command)),
        }
    }
}

pub(crate) fn rules(redirection: &Redirection) -> Vec<Part> {
    let mut parts = Vec::new();
    for table in redirection.ruleset().tables {
        for chain in table.chains {
            for (at, rule) in chain.rules.iter().enumerate() {
                let (table, chain) = (table.name.clone(), chain.name.clone());
                parts.push(Part::Rule {
                    table,
                    chain,
                    at,
                    text: rule.to_string(),
                });
            }
        }
    }
    parts
}

/// Returns parts for a pod with both families.
fn parts(settings: &Ambient) -> Vec<Part> {
    let mut parts = rules(&Redirection::Ambient(settings.clone()));
    // `guard` and `udp` have the tests of these.
    parts.retain(|part| !part.is_guard() && !part.only_counts());
    for family in if settings.ipv6 == Ipv6::Off {
        &[Family::V4]
    } else {
        Family::ALL.as_slice()
    } {
        let number = if *family == Family::V4 { "-4" } else { "-6" };
        parts.push(Part::Route(format!("{number} rule del pref 500")));
        parts.push(Part::Route(format!(
            "{number} route del local default dev lo table 10500"
        )));
    }
    parts
}

#[test]
fn every_rule_is_needed_by_a_check() {
    let mut tried = BTreeSet::new();
    let richest = RICHEST.map(|name| (name, scenario(name)));
    let others = scenarios::all().filter(|(name, _)| !RICHEST.contains(name));
    let mut work = Vec::new();
    for (name, settings) in richest.into_iter().chain(others) {
        let mut chosen = parts(&settings);
        chosen.retain(|part| tried.insert(part.what()) || all());
        // Several pods share large scenarios' rules.
        let some = chosen
            .chunks(8)
            .map(|some| (name, settings.clone(), some.to_vec()));
        work.extend(some);
    }
    let idle = at_once(MAX_PODS, &work, |(name, settings, chosen)| {
        let world = World::new(Pod::Dual);
        try_without(&world, name, settings, chosen)
    });
    let idle: Vec<_> = idle.into_iter().flatten().collect();
    assert_eq!(idle, [""; 0], "nothing fails where these are missing");
}

/// Returns parts without which all checks pass; prints the others' failing checks.
fn try_without(world: &World, name: &str, settings: &Ambient, chosen: &[Part]) -> Vec<String> {
    world.apply(settings);
    let checks = checks(settings, world.families());
    let mut idle = Vec::new();
    for part in chosen {
        part.delete(world);
        let missed = run_all_once(world, &checks);
        let what = part.what();
        println!("{name}: without {what}\n    {}", missed.join("\n    "));
        if missed.is_empty() {
            idle.push(format!("{name}: {what}"));
        }
        assert!(world.apply(settings).changed, "{what} was not missing");
    }
    assert_eq!(run_all(world, &checks), [""; 0], "{name}, mended");
    idle
}
