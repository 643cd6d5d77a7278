//! With tokio's clock standing still but for sleeps.

use futures_util::FutureExt as _;
use tokio::{
    task::yield_now,
    time::{advance, sleep, timeout},
};

use super::*;

fn admission(max: usize) -> Admission {
    Admission::new(NonZeroUsize::new(max).unwrap())
}

fn soon(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

#[tokio::test(start_paused = true)]
async fn turns_come_in_order_of_deadline_and_never_more_than_may() {
    let admission = admission(2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let held = [
        admission.turn(soon(9_000)).await,
        admission.turn(soon(9_000)).await,
    ];
    let adds: Vec<_> = [3_000, 1_000, 2_000, 4_000]
        .map(|millis| {
            let (admission, order) = (admission.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                let turn = admission.turn(soon(millis)).await.unwrap();
                order.lock().unwrap().push(millis);
                assert!(admission.working() <= 2);
                sleep(Duration::from_millis(10)).await;
                drop(turn);
            })
        })
        .into();
    while admission.waiting() < 4 {
        yield_now().await;
    }
    drop(held);
    for add in adds {
        add.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [1_000, 2_000, 3_000, 4_000]);
    assert_eq!((admission.working(), admission.waiting()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_that_would_wait_past_its_deadline_is_refused_at_once_and_told_what_is_ahead() {
    let admission = admission(1);
    for _ in 0..8 {
        let turn = admission.turn(soon(30_000)).await.unwrap();
        advance(Duration::from_secs(16)).await;
        drop(turn);
    }
    let _works = admission.turn(soon(30_000)).await.unwrap();
    let began = Instant::now();
    let failure = admission.turn(soon(3_000)).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!(failure.retry_after, Some(Duration::from_secs(16)));
    assert!(failure.message.contains("1 ADDs are ahead"), "{failure}");
    assert_eq!(admission.waiting(), 0);
    // By the pace it would be late, but that is not sure.
    let mut waits = Box::pin(admission.turn(soon(5_000)));
    assert!(waits.as_mut().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn one_whose_turn_does_not_come_is_refused_at_its_deadline() {
    let admission = admission(1);
    let _works = admission.turn(soon(30_000)).await.unwrap();
    let began = Instant::now();
    let failure = admission.turn(soon(3_000)).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(3));
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!((admission.working(), admission.waiting()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn one_whose_caller_goes_away_leaves_the_queue_and_passes_on_a_turn_it_was_given() {
    let admission = admission(1);
    let works = admission.turn(soon(30_000)).await.unwrap();
    assert!(
        timeout(Duration::from_secs(1), admission.turn(soon(9_000)))
            .await
            .is_err()
    );
    assert_eq!(admission.waiting(), 0);
    // Called, and gone before it heard.
    let mut leaves = Box::pin(admission.turn(soon(9_000)));
    assert!(leaves.as_mut().now_or_never().is_none());
    let mut stays = Box::pin(admission.turn(soon(10_000)));
    assert!(stays.as_mut().now_or_never().is_none());
    drop(works);
    drop(leaves);
    assert!(stays.now_or_never().is_some_and(|turn| turn.is_ok()));
    assert_eq!((admission.working(), admission.waiting()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_that_rests_holds_nobody_up_and_comes_back_to_its_place() {
    let admission = admission(1);
    let mut first = admission.turn(soon(1_000)).await.unwrap();
    first.rest();
    let second = admission.turn(soon(2_000)).await.unwrap();
    let mut third = Box::pin(admission.turn(soon(3_000)));
    assert!(third.as_mut().now_or_never().is_none());
    {
        let mut back = Box::pin(first.resume());
        assert!(back.as_mut().now_or_never().is_none(), "one works");
        drop(second);
        assert!(back.now_or_never().is_some_and(|back| back.is_ok()));
    }
    assert!(third.as_mut().now_or_never().is_none(), "the first works");
    drop(first);
    assert!(third.now_or_never().is_some_and(|turn| turn.is_ok()));
}
