//! UDP flows that leave a pod past capture are counted.

use netconfig::{Family, rules::Redirection};

use crate::packets::{
    matrix::scenario,
    probe::Dial,
    world::{Place, Pod, World, loopback, outside, pod},
};
use crate::support::sandbox;

/// The mark of ztunnel's own packets.
const FROM_ZTUNNEL: u32 = 0x539;

fn counted(world: &World) -> Option<u64> {
    let seen = world.writer.observe(&world.pod.netns).unwrap();
    assert!(seen.intact, "{seen:?}");
    seen.uncaptured_udp_flows
}

/// Sends to the outside and returns once the answer has arrived.
fn query(world: &World, dial: &Dial) {
    let answer = dial.ask(world);
    assert!(answer.by().is_some(), "{dial:?}: {answer}");
}

#[test]
fn uncaptured_udp_counts_flows_and_is_no_drift() {
    let world = World::new(Pod::Dual);
    let settings = scenario("plain");
    let fingerprint = world.apply(&settings).fingerprint;
    assert_eq!(counted(&world), Some(0), "no flow was opened yet");
    for (number, family) in (1..).zip(world.families()) {
        let dial = Dial::udp(Place::Pod, outside(*family), 53);
        let mut flow = dial.hold(&world).0.unwrap();
        for _ in 0..3 {
            flow.ask().unwrap();
        }
        assert_eq!(counted(&world), Some(number), "{dial:?}");
    }
    let redirection = Redirection::Ambient(settings.clone());
    let verified = world.writer.verify(&world.pod.netns, &redirection).unwrap();
    assert_eq!(verified.differences, [""; 0]);
    assert_eq!(verified.fingerprint, fingerprint);
    assert!(!world.apply(&settings).changed);
    assert_eq!(counted(&world), Some(2), "an apply without a change");
    world.pod.nft("delete table inet inpod-nat");
    let repaired = world
        .writer
        .apply(&world.pod.netns, &redirection, &sandbox("c1"));
    assert_eq!(repaired.unwrap().fingerprint, fingerprint);
    assert_eq!(counted(&world), Some(0), "the rules were written again");
}

#[test]
fn uncaptured_udp_leaves_out_all_other_traffic() {
    let world = World::new(Pod::Dual);
    world.apply(&scenario("dns"));
    for family in world.families() {
        query(&world, &Dial::udp(Place::Pod, outside(*family), 53));
        query(&world, &Dial::udp(Place::Pod, loopback(*family), 53));
        let marked = Dial::udp(Place::Pod, outside(*family), 53).marked(FROM_ZTUNNEL);
        query(&world, &marked);
        query(&world, &Dial::tcp(Place::Pod, outside(*family), 8080));
        query(&world, &Dial::tcp(Place::Outside, pod(*family), 8080));
    }
    assert_eq!(counted(&world), Some(0));
    world.apply(&scenario("plain"));
    query(&world, &Dial::udp(Place::Pod, outside(Family::V4), 53));
    assert_eq!(
        counted(&world),
        Some(1),
        "the same query without DNS capture"
    );
}
