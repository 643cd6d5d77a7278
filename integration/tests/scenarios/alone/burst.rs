//! Concurrent ADDs and DELs: their order, what refused calls leave, and pod-events' cost.

mod bench;
mod storm;
mod tally;

use inpod_proto::types::v1::Enrollment;
use inpod_types::Reason;
use integration::{Answer, Called, Named, Spec};

use bench::{Bench, PLUGIN, ambient, named, specs, without_netns};
use tally::{all_ok, outcomes, print_line};

impl Bench {
    fn answer<T>(&self, call: Called<T>) -> Answer<T> {
        self.verbs.answers(vec![call]).unwrap().pop().unwrap()
    }
}

#[test]
fn a_del_ends_an_add_that_waits_for_its_turn_at_once() {
    let (bench, proxy) = Bench::with_one_permit();
    let (works, waits) = (
        bench.node.sandbox(Spec::new("works").ambient()).unwrap(),
        bench.node.sandbox(Spec::new("waits").ambient()).unwrap(),
    );
    let (held, first) = bench.hold_permit(&proxy, &works);
    let second = bench.verbs.add(&Named::of(&waits), PLUGIN);
    bench.until("adds_waiting", 1.0);

    let del = bench.answer(bench.verbs.del(&Named::of(&waits)));
    assert!(del.result.is_ok(), "{del:?}");
    let refused = bench.answer(second).result.unwrap_err();
    assert_eq!(refused.reason, Reason::SandboxNotCurrent, "{refused}");
    bench.until("adds_waiting", 0.0);
    assert_eq!(waits.traces().unwrap(), Vec::<String>::new());
    held.release();
    assert!(bench.answer(first).result.is_ok());
    let (uids, paths, records) = bench.known();
    assert_eq!((uids.len(), paths.len(), records), (1, 1, 1));
}

/// The number of sandboxes that end concurrently.
const END: usize = 40;

/// Waiting ADDs do no work, so they must cost other calls nothing.
const WAIT: usize = 200;

#[test]
fn dels_are_answered_while_200_adds_wait() {
    let (bench, proxy) = Bench::with_one_permit();
    let waiting = without_netns(&bench.node, &ambient("wait", WAIT), 0);
    let before = bench.node.pods(ambient("before", END)).unwrap();
    let meanwhile = bench.node.pods(ambient("meanwhile", END)).unwrap();
    let turn = bench.node.sandbox(Spec::new("turn").ambient()).unwrap();
    bench.warm();

    let undisturbed = bench.verbs.answers(bench.dels(&named(&before))).unwrap();
    let (held, first) = bench.hold_permit(&proxy, &turn);
    let adds = bench.adds(&waiting);
    bench.until("adds_waiting", 200.0);
    let disturbed = bench.verbs.answers(bench.dels(&named(&meanwhile))).unwrap();
    bench.until("adds_waiting", 200.0);
    eprintln!(
        "{END} DELs: {}; while {WAIT} ADDs wait: {}",
        print_line(&undisturbed),
        print_line(&disturbed)
    );

    assert_eq!(outcomes(&undisturbed), all_ok(END));
    assert_eq!(outcomes(&disturbed), all_ok(END));
    // They were answered while every ADD still waited.
    let ends = bench.verbs.answers(bench.dels(&waiting)).unwrap();
    assert_eq!(outcomes(&ends), all_ok(WAIT));
    let refused = bench.verbs.answers(adds).unwrap();
    let ended = Reason::SandboxNotCurrent.name().to_owned();
    assert_eq!(outcomes(&refused), [(ended, WAIT)].into());
    held.release();
    assert!(bench.answer(first).result.is_ok());
}

#[test]
fn a_del_ends_an_add_that_waits_for_a_ztunnel_and_its_undoing_is_awaited() {
    let bench = Bench::without_ztunnel();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    let add = bench.verbs.add(&Named::of(&pod), PLUGIN);
    bench.until_claimed(1);
    let del = bench.answer(bench.verbs.del(&Named::of(&pod)));
    // It is undone before the DEL is answered.
    let (uids, paths, records) = bench.known();
    assert_eq!((uids.len(), paths.len(), records), (0, 0, 0));
    assert!(del.result.is_ok(), "{del:?}");
    let refused = bench.answer(add).result.unwrap_err();
    assert_eq!(refused.reason, Reason::SandboxNotCurrent, "{refused}");
}

#[test]
fn while_100_adds_wait_for_a_ztunnel_nobody_else_waits_and_they_succeed_when_it_comes() {
    let bench = Bench::without_ztunnel();
    let outside = without_netns(&bench.node, &specs("outside", 1), 0);
    let pods = bench.node.sandboxes(ambient("w", 101)).unwrap();
    bench.until_known(&pods);
    let (last, first) = pods.split_last().unwrap();
    let adds = bench.adds(&named(first));
    bench.until_claimed(100);
    bench.until("adds_worked_on", 0.0);
    // More ADDs wait than there are permits. Another ADD gets its permit; a pod outside the mesh and a DEL need none.
    let one_more = bench.verbs.add(&Named::of(last), PLUGIN);
    bench.until_claimed(101);
    let added = bench.verbs.answers(bench.adds(&outside)).unwrap();
    let added = added.first().unwrap();
    let enrollment = added.result.as_ref().unwrap().enrollment();
    assert_eq!(enrollment, Enrollment::None);
    let dels = bench.verbs.answers(bench.dels(&outside)).unwrap();
    assert_eq!(outcomes(&dels), all_ok(1));

    bench.node.start_ztunnel(&[]).unwrap();
    let adds = bench.verbs.answers(adds).unwrap();
    assert_eq!(outcomes(&adds), all_ok(100));
    assert!(bench.answer(one_more).result.is_ok());
}
