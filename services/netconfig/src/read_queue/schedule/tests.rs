use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const NETNS: NetnsId = NetnsId {
    device: 4,
    inode: 5,
    cookie: 6,
};

fn sandbox(name: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: name.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

fn reads(schedule: &mut Schedule, now: Instant) -> Vec<String> {
    std::iter::from_fn(|| schedule.pop_due(now))
        .map(|work| match work {
            Work::Read(sandbox) => sandbox.container_id.to_string(),
            Work::Ended(sandbox, _) => format!("end of {}", sandbox.container_id),
        })
        .collect()
}

/// Returns a schedule after its first reads, and the time of the reads.
fn read_once(names: &[&str]) -> (Schedule, Instant) {
    let start = Instant::now();
    let mut schedule = Schedule::new(MINUTE);
    for name in names {
        schedule.add(sandbox(name), 999, start);
    }
    let read = start + COALESCE_DELAY;
    assert_eq!(reads(&mut schedule, read), names);
    (schedule, read)
}

#[test]
fn a_new_claim_is_read_once_and_then_rests() {
    let (mut schedule, read) = read_once(&["a", "b"]);
    assert_eq!(reads(&mut schedule, read + MINUTE / 2), [""; 0]);
}

#[test]
fn many_events_are_one_read_after_a_short_delay() {
    let (mut schedule, read) = read_once(&["a", "b"]);
    let now = read + MINUTE / 2;
    assert!(schedule.mark_changed(&sandbox("a"), now));
    for later in [1, 5, 19] {
        let woken = schedule.mark_changed(&sandbox("a"), now + Duration::from_millis(later));
        assert!(!woken, "it is to be read at the same time as before");
    }
    assert_eq!(schedule.next_due_at(), Some(now + COALESCE_DELAY));
    assert_eq!(
        reads(
            &mut schedule,
            now + COALESCE_DELAY - Duration::from_millis(1)
        ),
        [""; 0]
    );
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY), ["a"]);
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY * 2), [""; 0]);
}

#[test]
fn an_event_during_a_read_is_one_more_read_but_not_before_a_rest() {
    let (mut schedule, read) = read_once(&["a"]);
    schedule.mark_changed(&sandbox("a"), read);
    let early = read + MIN_READ_INTERVAL - Duration::from_millis(1);
    assert_eq!(reads(&mut schedule, early), [""; 0]);
    assert_eq!(reads(&mut schedule, read + MIN_READ_INTERVAL), ["a"]);
}

#[test]
fn a_netns_that_never_rests_is_read_five_times_a_second_and_does_not_hold_up_another() {
    let (mut schedule, start) = read_once(&["a", "b"]);
    let mut order = Vec::new();
    for step in 0..1000 {
        let now = start + Duration::from_millis(step);
        schedule.mark_changed(&sandbox("a"), now);
        if step == 500 {
            schedule.mark_changed(&sandbox("b"), now);
        }
        order.extend(reads(&mut schedule, now));
    }
    assert_eq!(order, ["a", "a", "b", "a", "a"]);
}

#[test]
fn what_is_due_longest_is_read_first() {
    let (mut schedule, read) = read_once(&["a", "b"]);
    let now = read + MINUTE / 2;
    schedule.mark_changed(&sandbox("b"), now);
    schedule.mark_changed(&sandbox("a"), now + Duration::from_millis(1));
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY * 2), ["b", "a"]);
}

#[test]
fn an_overrun_has_everything_read_that_was_not_read_since() {
    let (mut schedule, read) = read_once(&["a", "b"]);
    let now = read + MINUTE / 2;
    schedule.mark_all_changed(now);
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY), ["a", "b"]);
    // Reads of the first overrun are pending, and one read is done.
    let now = now + MINUTE / 4;
    schedule.mark_all_changed(now);
    schedule.request_read(&sandbox("a"), now, now);
    assert_eq!(reads(&mut schedule, now), ["a"]);
    schedule.mark_all_changed(now + COALESCE_DELAY / 2);
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY), ["a", "b"]);
}

#[test]
fn everything_is_read_at_most_once_a_second_however_many_overruns_there_are() {
    let (mut schedule, start) = read_once(&["a"]);
    let mut count = 0;
    for step in 0..3000 {
        let now = start + Duration::from_millis(step);
        schedule.mark_all_changed(now);
        count += reads(&mut schedule, now).len();
    }
    assert_eq!(count, 3);
}

#[test]
fn each_claim_is_read_once_in_a_period_at_a_time_of_its_own() {
    let start = Instant::now();
    let mut schedule = Schedule::new(MINUTE);
    for (name, phase) in [("a", 250), ("b", 750)] {
        schedule.add(sandbox(name), phase, start);
    }
    assert_eq!(reads(&mut schedule, start + COALESCE_DELAY), ["a", "b"]);
    let mut seen = Vec::new();
    for second in 1..=120 {
        let found = reads(&mut schedule, start + Duration::from_secs(second));
        seen.extend(found.into_iter().map(|name| (second, name)));
    }
    let seen: Vec<_> = seen.iter().map(|(at, name)| (*at, name.as_str())).collect();
    assert_eq!(seen, [(15, "a"), (45, "b"), (75, "a"), (105, "b")]);
}

#[test]
fn periodic_reads_of_many_claims_are_no_more_than_of_few() {
    let start = Instant::now();
    let reads_in_an_hour = |claims| {
        let mut schedule = Schedule::new(MINUTE);
        for claim in 0..claims {
            let sandbox = sandbox(&format!("c{claim}"));
            schedule.add(sandbox, 1 + claim % 999, start);
        }
        reads(&mut schedule, start + COALESCE_DELAY);
        let seconds = (1..=3600).map(|second| start + Duration::from_secs(second));
        let hour: Vec<_> = seconds.flat_map(|now| reads(&mut schedule, now)).collect();
        hour.len()
    };
    assert_eq!(reads_in_an_hour(75), 75 * 60);
    let many = reads_in_an_hour(750);
    assert!((75 * 54..=75 * 66).contains(&many), "{many}");
}

#[test]
fn a_claim_that_ended_is_not_read_and_its_end_comes_before_a_next_claim() {
    let (mut schedule, read) = read_once(&["a"]);
    let now = read + MINUTE / 2;
    schedule.mark_changed(&sandbox("a"), now);
    schedule.remove(&sandbox("a"), NETNS);
    assert!(!schedule.mark_changed(&sandbox("a"), now));
    schedule.add(sandbox("a"), 999, now);
    assert_eq!(
        schedule.pop_due(now),
        Some(Work::Ended(sandbox("a"), NETNS))
    );
    assert_eq!(reads(&mut schedule, now + COALESCE_DELAY), ["a"]);
}
