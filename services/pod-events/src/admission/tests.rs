//! Runs on tokio's paused clock, which advances only for timers.

use futures_util::FutureExt as _;
use tokio::{
    task::yield_now,
    time::{advance, sleep, timeout},
};

use super::*;

fn admission(max: usize) -> Admission {
    Admission::new(NonZeroUsize::new(max).unwrap())
}

fn deadline_in(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

#[tokio::test(start_paused = true)]
async fn permits_come_in_order_of_deadline_and_never_more_than_the_maximum() {
    let admission = admission(2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let held = [
        admission.acquire(deadline_in(9_000)).await,
        admission.acquire(deadline_in(9_000)).await,
    ];
    let adds: Vec<_> = [3_000, 1_000, 2_000, 4_000]
        .map(|millis| {
            let (admission, order) = (admission.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                let permit = admission.acquire(deadline_in(millis)).await.unwrap();
                order.lock().unwrap().push(millis);
                assert!(admission.working() <= 2);
                sleep(Duration::from_millis(10)).await;
                drop(permit);
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
async fn an_add_that_would_wait_past_its_deadline_is_refused_at_once_with_what_is_ahead() {
    let admission = admission(1);
    for _ in 0..8 {
        let permit = admission.acquire(deadline_in(30_000)).await.unwrap();
        advance(Duration::from_secs(16)).await;
        drop(permit);
    }
    let _works = admission.acquire(deadline_in(30_000)).await.unwrap();
    let began = Instant::now();
    let failure = admission.acquire(deadline_in(3_000)).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!(failure.retry_after, Some(Duration::from_secs(16)));
    assert!(failure.message.contains("1 ADDs are ahead"), "{failure}");
    assert_eq!(admission.waiting(), 0);
    // Late by the estimate, but within the tolerance.
    let mut waits = Box::pin(admission.acquire(deadline_in(5_000)));
    assert!(waits.as_mut().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn an_add_that_gets_no_permit_is_refused_at_its_deadline() {
    let admission = admission(1);
    let _works = admission.acquire(deadline_in(30_000)).await.unwrap();
    let began = Instant::now();
    let failure = admission.acquire(deadline_in(3_000)).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(3));
    assert_eq!(failure.reason, Reason::Overloaded);
    assert_eq!((admission.working(), admission.waiting()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_add_whose_caller_goes_away_leaves_the_queue_and_passes_on_its_permit() {
    let admission = admission(1);
    let works = admission.acquire(deadline_in(30_000)).await.unwrap();
    assert!(
        timeout(
            Duration::from_secs(1),
            admission.acquire(deadline_in(9_000))
        )
        .await
        .is_err()
    );
    assert_eq!(admission.waiting(), 0);
    // Granted a permit, and dropped before it was polled.
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
async fn an_add_that_releases_its_permit_blocks_no_other_and_keeps_its_position() {
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
