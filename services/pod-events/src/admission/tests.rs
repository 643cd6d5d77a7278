//! Tests of the admission queue on tokio's paused clock, which advances only for timers.

use futures_util::FutureExt as _;
use proptest::prelude::*;

use super::*;

fn admission(max: usize) -> Admission {
    Admission::new(NonZeroUsize::new(max).unwrap())
}

fn deadline_in(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

#[tokio::test(start_paused = true)]
async fn an_add_that_gets_no_permit_is_refused_at_its_deadline() {
    let admission = admission(1);
    let _works = admission.acquire(deadline_in(30_000)).await.unwrap();
    let began = Instant::now();
    let failure = admission.acquire(deadline_in(3_000)).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(3));
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!(failure.retry_after, Some(RETRY_AFTER));
    assert!(failure.message.contains("1 ADDs were ahead"), "{failure}");
    assert_eq!((admission.working(), admission.waiting()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_add_whose_caller_goes_away_passes_on_its_permit() {
    let admission = admission(1);
    let works = admission.acquire(deadline_in(30_000)).await.unwrap();
    // The first waiter is granted a permit, and dropped before the next poll.
    let mut leaves = Box::pin(admission.acquire(deadline_in(9_000)));
    assert!(leaves.as_mut().now_or_never().is_none());
    let mut stays = Box::pin(admission.acquire(deadline_in(10_000)));
    assert!(stays.as_mut().now_or_never().is_none());
    drop(works);
    drop(leaves);
    assert!(stays.now_or_never().is_some_and(|permit| permit.is_ok()));
    assert_eq!((admission.working(), admission.waiting()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_released_permit_blocks_no_other_add_and_keeps_its_position() {
    let admission = admission(1);
    let mut first = admission.acquire(deadline_in(1_000)).await.unwrap();
    first.release();
    let second = admission.acquire(deadline_in(2_000)).await.unwrap();
    let mut third = Box::pin(admission.acquire(deadline_in(3_000)));
    assert!(third.as_mut().now_or_never().is_none());
    {
        let mut back = Box::pin(first.reacquire());
        assert!(back.as_mut().now_or_never().is_none(), "one works");
        drop(second);
        assert!(back.now_or_never().is_some_and(|back| back.is_ok()));
    }
    assert!(third.as_mut().now_or_never().is_none(), "the first works");
    drop(first);
    assert!(third.now_or_never().is_some_and(|permit| permit.is_ok()));
}

#[derive(Clone, Debug)]
enum Event {
    /// An ADD arrives with a deadline in the given number of seconds.
    Arrive(u64),
    /// The caller of the waiting ADD with the given index (modulo the number of waiting ADDs) goes away.
    Leave(usize),
    /// The working ADD with the given index (modulo the number of working ADDs) is done.
    Finish(usize),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1..50_u64).prop_map(Event::Arrive),
        1 => any::<usize>().prop_map(Event::Leave),
        2 => any::<usize>().prop_map(Event::Finish),
    ]
}

/// Advances the called ADDs from waiting to working. Returns the deadlines of the advanced ADDs.
fn called<F>(waiting: &mut Vec<(u64, std::pin::Pin<Box<F>>)>, working: &mut Vec<Permit>) -> Vec<u64>
where
    F: Future<Output = Result<Permit, Failure>>,
{
    let mut started = Vec::new();
    waiting.retain_mut(|(millis, waits)| match waits.as_mut().now_or_never() {
        Some(permit) => {
            working.push(permit.unwrap());
            started.push(*millis);
            false
        }
        None => true,
    });
    started
}

proptest! {
    #[test]
    fn permits_go_to_the_earliest_deadline_up_to_the_maximum(
        max in 1..5_usize,
        events in prop::collection::vec(event(), 0..200),
    ) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let _within = runtime.enter();
        let (admission, start) = (admission(max), Instant::now());
        let (mut waiting, mut working) = (Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Arrive(seconds) => {
                    let has_to_wait = working.len() == max;
                    let until = start + Duration::from_secs(seconds);
                    waiting.push((seconds, Box::pin(admission.acquire(until))));
                    let started = called(&mut waiting, &mut working);
                    prop_assert_eq!(started.is_empty(), has_to_wait);
                }
                Event::Leave(which) => {
                    if !waiting.is_empty() {
                        drop(waiting.remove(which % waiting.len()));
                    }
                    prop_assert_eq!(called(&mut waiting, &mut working), [0; 0]);
                }
                Event::Finish(which) => {
                    if !working.is_empty() {
                        drop(working.remove(which % working.len()));
                        let earliest = waiting.iter().map(|(seconds, _)| *seconds).min();
                        let started = called(&mut waiting, &mut working);
                        prop_assert_eq!(started, Vec::from_iter(earliest));
                    }
                }
            }
            prop_assert_eq!(
                (admission.working(), admission.waiting()),
                (working.len(), waiting.len())
            );
            prop_assert!(working.len() == max || waiting.is_empty());
        }
    }
}
