//! Istio's node agent's state next to ours.

use netconfig::{
    Backend,
    rules::{Ambient, scenarios},
};

use crate::packets::world::{BACKENDS, World};

pub(crate) fn settings() -> Ambient {
    let found = scenarios::all().find(|(name, _)| *name == "probes");
    Ambient {
        dns_capture: true,
        ..found.unwrap().1
    }
}

/// Returns lines that are left, by their names.
pub(crate) fn left(world: &World) -> Vec<String> {
    let mut listed = world.pod.nft("list ruleset");
    if BACKENDS.contains(&Backend::IptablesLegacy) {
        for program in ["iptables-legacy-save", "ip6tables-legacy-save"] {
            listed += &world.pod.command(program, &[]);
        }
    }
    let is_its = |line: &&str| line.contains("istio") || line.contains("ISTIO");
    listed
        .lines()
        .filter(is_its)
        .map(ToOwned::to_owned)
        .collect()
}
