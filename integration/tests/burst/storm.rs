//! 500 ADDs and 500 DELs at once.

use std::{collections::BTreeSet, time::Duration};

use anyhow::ensure;
use inpod_proto::podevents::v1::{AddPodResponse, DeletePodResponse};
use inpod_types::Reason;
use integration::{Answer, Named, Node, PATIENCE, Pod, eventually};

use crate::{
    bench::{Bench, PLUGIN, ambient, named, specs, unreal},
    tally::{all_ok, outcomes, percentile, told},
};

/// How many sandboxes stand before the burst and end in it.
const STAND: usize = 80;
/// How many sandboxes of the mesh come in it and stay.
const STAY: usize = 80;
/// How many sandboxes of the mesh come in it and end meanwhile.
const COME_AND_GO: usize = 40;
/// How many pods outside of the mesh come in it and end meanwhile.
const OUTSIDE: usize = 190;
/// How many pods of the mesh come whose netns is not there, and end meanwhile.
const LOST: usize = 190;

/// What the plugin gives the agent for a DEL.
const PLUGIN_DEL: Duration = Duration::from_secs(5);

/// Connections between services come and go.
const CONNECTIONS: usize = 4;

/// What pod-events may need at most, in KiB.
const MOST_RESIDENT: u64 = 128 * 1024;

/// Who takes part.
struct Cast {
    lost: Vec<Named>,
    outside: Vec<Named>,
    standing: Vec<Pod>,
    coming: Vec<Pod>,
    going: Vec<Pod>,
}

impl Cast {
    fn on(bench: &Bench) -> Self {
        let node = &bench.node;
        let cast = Self {
            lost: unreal(node, &ambient("lost", LOST), 0),
            outside: unreal(node, &specs("outside", OUTSIDE), LOST),
            standing: node.pods(ambient("stand", STAND)).unwrap(),
            coming: node.sandboxes(ambient("stay", STAY)).unwrap(),
            going: node.sandboxes(ambient("go", COME_AND_GO)).unwrap(),
        };
        bench.until_known(&cast.coming);
        bench.until_known(&cast.going);
        cast
    }

    /// Those that come and end meanwhile.
    fn brief(&self) -> Vec<Named> {
        let going = named(&self.going);
        [&self.lost[..], &going, &self.outside].concat()
    }
}

/// The answers of a burst.
struct Answers {
    standing: Vec<Answer<DeletePodResponse>>,
    brief: Vec<Answer<DeletePodResponse>>,
    lost: Vec<Answer<AddPodResponse>>,
    going: Vec<Answer<AddPodResponse>>,
    coming: Vec<Answer<AddPodResponse>>,
    outside: Vec<Answer<AddPodResponse>>,
}

impl Answers {
    fn of(bench: &Bench, cast: &Cast) -> Self {
        let standing = bench.dels(&named(&cast.standing));
        let lost = bench.adds(&cast.lost);
        let going = bench.adds(&named(&cast.going));
        let coming = bench.adds(&named(&cast.coming));
        let outside = bench.adds(&cast.outside);
        bench.until_busy();
        let brief = bench.dels(&cast.brief());
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
        eprintln!("ADD: {}", told(self.adds()));
        eprintln!("  of those that stay: {}", told(&self.coming));
        eprintln!("  of those that go: {}", told(&self.going));
        eprintln!("  of those that are lost: {}", told(&self.lost));
        eprintln!("  of those outside: {}", told(&self.outside));
        eprintln!("DEL: {}", told(self.dels()));
        let is_deferred = |answer: &&Answer<DeletePodResponse>| {
            let result = answer.result.as_ref();
            result.is_ok_and(|response| response.deferred)
        };
        let deferred = self.dels().filter(is_deferred).count();
        eprintln!("  deferred: {deferred}");
        eprintln!("  of those that stood: {}", told(&self.standing));
        eprintln!("  of those that came: {}", told(&self.brief));
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

    /// What succeeded before its DEL keeps its rules until its netns ends.
    fn refused_left_nothing(&self, cast: &Cast) {
        let going = cast.going.iter().zip(&self.going);
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
    let cast = Cast::on(&bench);
    // Every connection is there before descriptors are counted.
    bench.warm();
    let descriptors = bench.descriptors();
    let resident = bench.node.resident("pod-events").unwrap();

    let answers = Answers::of(&bench, &cast);
    let peak = bench.peak();
    answers.tell();
    eprintln!("resident {resident} KiB before, {peak} KiB at most");
    answers.must_be_in_time_and_with_a_reason();
    assert!(peak < MOST_RESIDENT, "{peak} KiB");

    // A runtime repeats the DEL of what it was not sure of; what came after its DEL ends now.
    let again = bench.verbs.answers(bench.dels(&cast.brief())).unwrap();
    assert_eq!(outcomes(&again), all_ok(LOST + COME_AND_GO + OUTSIDE));
    only_what_stays_is_left(&bench, &cast);
    answers.refused_left_nothing(&cast);
    // As many pods stand as did.
    eventually("no descriptor is left over", PATIENCE, || {
        let now = bench.descriptors();
        let mut pairs = now.iter().zip(&descriptors);
        let is_back = pairs.all(|(now, before)| *now <= before + CONNECTIONS);
        ensure!(is_back, "{now:?}, before {descriptors:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn only_what_stays_is_left(bench: &Bench, cast: &Cast) {
    let uids: BTreeSet<_> = cast.coming.iter().map(|pod| pod.spec.uid.clone()).collect();
    let paths = named(&cast.coming).into_iter().map(|it| it.netns.path);
    let wanted = (uids, paths.collect::<BTreeSet<_>>(), STAY);
    eventually("only what stays is known", PATIENCE, || {
        let known = bench.known();
        ensure!(known == wanted, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    for pod in cast.coming.iter().step_by(16) {
        bench.node.until_whole(&pod.spec).unwrap();
    }
}
