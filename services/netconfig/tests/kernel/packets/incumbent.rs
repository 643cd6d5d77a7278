//! Istio's node agent's state next to ours.

use netconfig::rules::Ambient;

use crate::packets::world::World;
use crate::scenarios;

pub(crate) fn settings() -> Ambient {
    let found = scenarios::all().find(|(name, _)| *name == "probes");
    Ambient {
        dns_capture: true,
        ..found.unwrap().1
    }
}

/// Returns lines that are left, by their names.
pub(crate) fn left(world: &World) -> Vec<String> {
    let listed = world.pod.nft("list ruleset");
    let is_its = |line: &&str| line.contains("istio") || line.contains("ISTIO");
    listed
        .lines()
        .filter(is_its)
        .map(ToOwned::to_owned)
        .collect()
}
