//! 500 concurrent ADDs and 500 concurrent DELs.

use std::{collections::BTreeSet, time::Duration};

use anyhow::ensure;
use inpod_proto::podevents::v1::{AddPodResponse, DeletePodResponse};
use inpod_types::Reason;
use integration::{Answer, Named, Node, Pod, TIMEOUT, eventually};

use super::{
    bench::{Bench, PLUGIN, ambient, named, specs, without_netns},
    tally::{all_ok, outcomes, percentile, print_line},
};

/// Sandboxes that only end in the burst.
const STAND: usize = 80;
/// Pods of the mesh, added to stay.
const STAY: usize = 80;
/// Pods of the mesh, added and deleted.
const COME_AND_GO: usize = 40;
/// Pods outside the mesh, added and deleted.
const OUTSIDE: usize = 190;
/// Pods of the mesh without a netns, added and deleted.
const LOST: usize = 190;

/// The plugin's time limit for the agent's answer to a DEL.
const PLUGIN_DEL: Duration = Duration::from_secs(5);

/// Connections between services open and close.
const DESCRIPTOR_TOLERANCE: usize = 4;

/// The limit of pod-events' memory, in KiB.
const MAX_RESIDENT: u64 = 128 * 1024;

struct Sandboxes {
    lost: Vec<Named>,
    outside: Vec<Named>,
    standing: Vec<Pod>,
    coming: Vec<Pod>,
    going: Vec<Pod>,
}

impl Sandboxes {
    fn on(bench: &Bench) -> Self {
        let node = &bench.node;
        let sandboxes = Self {
            lost: without_netns(node, &ambient("lost", LOST), 0),
            outside: without_netns(node, &specs("outside", OUTSIDE), LOST),
            standing: node.pods(ambient("stand", STAND)).unwrap(),
            coming: node.sandboxes(ambient("stay", STAY)).unwrap(),
            going: node.sandboxes(ambient("go", COME_AND_GO)).unwrap(),
        };
        bench.until_known(&sandboxes.coming);
        bench.until_known(&sandboxes.going);
        sandboxes
    }

    fn short_lived(&self) -> Vec<Named> {
        let going = named(&self.going);
        [&self.lost[..], &going, &self.outside].concat()
    }
}

struct Answers {
    standing: Vec<Answer<DeletePodResponse>>,
    brief: Vec<Answer<DeletePodResponse>>,
    lost: Vec<Answer<AddPodResponse>>,
    going: Vec<Answer<AddPodResponse>>,
    coming: Vec<Answer<AddPodResponse>>,
    outside: Vec<Answer<AddPodResponse>>,
}

impl Answers {
    fn of(bench: &Bench, sandboxes: &Sandboxes) -> Self {
        let standing = bench.dels(&named(&sandboxes.standing));
        let lost = bench.adds(&sandboxes.lost);
        let going = bench.adds(&named(&sandboxes.going));
        let coming = bench.adds(&named(&sandboxes.coming));
        let outside = bench.adds(&sandboxes.outside);
        bench.until_busy();
        let brief = bench.dels(&sandboxes.short_lived());
        let verbs = &bench.verbs;
        Self {
            standing: verbs.answers(standing).unwrap(),
            brief: verbs.answers(brief).unwrap(),
            lost: verbs.answers(lost).unwrap(),
            going: verbs.answers(going).unwrap(),
            coming: verbs.answers(coming).unwrap(),
            outside: verbs.answers(outside).unwrap(),
        }
    }

    fn dels(&self) -> impl Iterator<Item = &Answer<DeletePodResponse>> + Clone {
        self.standing.iter().chain(&self.brief)
    }

    fn adds(&self) -> impl Iterator<Item = &Answer<AddPodResponse>> + Clone {
        let lost_or_going = self.lost.iter().chain(&self.going);
        lost_or_going.chain(&self.coming).chain(&self.outside)
    }

    fn tell(&self) {
        eprintln!("ADD: {}", print_line(self.adds()));
        eprintln!("  of those that stay: {}", print_line(&self.coming));
        eprintln!("  of those that go: {}", print_line(&self.going));
        eprintln!("  of those that are lost: {}", print_line(&self.lost));
        eprintln!("  of those outside: {}", print_line(&self.outside));
        eprintln!("DEL: {}", print_line(self.dels()));
        let is_deferred = |answer: &&Answer<DeletePodResponse>| {
            let result = answer.result.as_ref();
            result.is_ok_and(|response| response.deferred)
        };
        let deferred = self.dels().filter(is_deferred).count();
        eprintln!("  deferred: {deferred}");
        eprintln!("  of those that stood: {}", print_line(&self.standing));
        eprintln!("  of those that came: {}", print_line(&self.brief));
    }

    fn must_be_in_time_and_with_a_reason(&self) {
        assert_eq!((self.adds().count(), self.dels().count()), (500, 500));
        assert_eq!(outcomes(self.dels()), all_ok(500));
        assert_eq!(outcomes(&self.coming), all_ok(STAY));
        for answer in self.adds() {
            if let Err(failure) = &answer.result {
                assert!(failure.reason != Reason::Internal, "{failure}");
                assert!(failure.undo_failures.is_empty(), "{failure:?}");
            }
            assert!(answer.took < PLUGIN, "{answer:?}");
        }
        let (dels, adds) = (percentile(self.dels(), 99), percentile(self.adds(), 99));
        assert!(dels < PLUGIN_DEL, "{dels:?}");
        assert!(dels < adds, "DELs take {dels:?} where ADDs take {adds:?}");
    }

    /// An ADD that succeeded before its DEL leaves rules until its netns ends.
    fn refused_left_nothing(&self, sandboxes: &Sandboxes) {
        let going = sandboxes.going.iter().zip(&self.going);
        let refused = going.filter(|(_, answer)| answer.result.is_err());
        for (pod, _) in refused {
            let traces = pod.traces().unwrap();
            assert_eq!(traces, Vec::<String>::new(), "{}", pod.spec.name);
        }
    }
}

#[test]
fn a_burst_of_500_adds_and_500_dels_ends_every_call_with_a_reason_and_leaves_nothing_of_the_refused()
 {
    let bench = Bench::over(Node::running().unwrap());
    let sandboxes = Sandboxes::on(&bench);
    // Opens every connection before descriptors are counted.
    bench.warm();
    let descriptors = bench.descriptors();
    let resident = bench.node.resident("pod-events").unwrap();

    let answers = Answers::of(&bench, &sandboxes);
    let peak = bench.peak();
    answers.tell();
    eprintln!("resident {resident} KiB before, {peak} KiB at most");
    answers.must_be_in_time_and_with_a_reason();
    assert!(peak < MAX_RESIDENT, "{peak} KiB");

    // A runtime repeats a DEL if unsure; an ADD that came after its DEL ends now.
    let again = bench
        .verbs
        .answers(bench.dels(&sandboxes.short_lived()))
        .unwrap();
    assert_eq!(outcomes(&again), all_ok(LOST + COME_AND_GO + OUTSIDE));
    only_what_stays_is_left(&bench, &sandboxes);
    answers.refused_left_nothing(&sandboxes);
    // The number of pods is unchanged.
    eventually("no descriptor is left over", TIMEOUT, || {
        let now = bench.descriptors();
        let mut pairs = now.iter().zip(&descriptors);
        let is_back = pairs.all(|(now, before)| *now <= before + DESCRIPTOR_TOLERANCE);
        ensure!(is_back, "{now:?}, before {descriptors:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn only_what_stays_is_left(bench: &Bench, sandboxes: &Sandboxes) {
    let uids: BTreeSet<_> = sandboxes
        .coming
        .iter()
        .map(|pod| pod.spec.uid.clone())
        .collect();
    let paths = named(&sandboxes.coming).into_iter().map(|it| it.netns.path);
    let wanted = (uids, paths.collect::<BTreeSet<_>>(), STAY);
    eventually("only what stays is known", TIMEOUT, || {
        let known = bench.known();
        ensure!(known == wanted, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    for pod in sandboxes.coming.iter().step_by(16) {
        bench.node.until_whole(&pod.spec).unwrap();
    }
}
