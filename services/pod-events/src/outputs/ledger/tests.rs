use super::*;
use crate::testing;

fn key(name: &str) -> PodKey {
    ("shop".parse().unwrap(), name.parse().unwrap())
}

/// A ledger and a clock of its own.
struct Play {
    ledger: Ledger,
    now: Instant,
}

impl Play {
    fn new() -> Self {
        Self {
            ledger: Ledger::default(),
            now: Instant::now(),
        }
    }

    fn after(&mut self, wait: Duration) -> &mut Self {
        self.now += wait;
        self
    }

    fn look_at(&mut self, name: &str, shown: Option<&str>, wish: Option<Mark>) {
        let uid = "uid".parse().unwrap();
        let look = Look {
            uid: &uid,
            shown,
            wish,
            serves_in: None,
        };
        self.ledger.look(&key(name), &look, self.now);
    }

    fn look(&mut self, shown: Option<&str>, wish: Mark) {
        self.look_at("web", shown, Some(wish));
    }

    fn serves(&mut self, container_id: &str, shown: Option<&str>) {
        let uid = "uid".parse().unwrap();
        let look = Look {
            uid: &uid,
            shown,
            wish: Some(Mark::Enabled),
            serves_in: Some(&testing::sandbox(container_id)),
        };
        self.ledger.look(&key("web"), &look, self.now);
    }

    fn next(&mut self) -> Option<Order> {
        self.ledger.next(self.now)
    }

    fn sent(&mut self) -> Mark {
        self.next().unwrap().mark
    }

    fn answer(&mut self, mark: Mark, answer: Answer) -> Option<Duration> {
        let order = Order {
            key: key("web"),
            uid: "uid".parse().unwrap(),
            mark,
        };
        self.ledger.answered(&order, answer, self.now)
    }

    fn has_withdrawn(&self, shown: Option<&str>) -> bool {
        let uid = "uid".parse().unwrap();
        self.ledger
            .has_withdrawn(&key("web"), &uid, shown, self.now)
    }
}

fn refused() -> Answer {
    Answer::Refused("no".to_owned())
}

fn unanswered() -> Answer {
    Answer::Unanswered("late".to_owned())
}

#[test]
fn what_a_pod_bears_already_or_may_keep_is_sent_to_nobody_and_remembered_nowhere() {
    let mut play = Play::new();
    play.look(Some("enabled"), Mark::Enabled);
    play.look_at("api", None, Some(Mark::Absent));
    play.look_at("db", Some("enabled"), None);
    assert_eq!(play.next(), None);
    assert!(play.ledger.entries.is_empty());
}

#[test]
fn one_patch_of_a_pod_is_under_way_and_the_latest_wish_follows_it() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    assert_eq!(play.sent(), Mark::Enabled);
    play.look(None, Mark::Pending);
    play.look(None, Mark::Absent);
    assert_eq!(play.next(), None, "one is under way");
    assert_eq!(play.answer(Mark::Enabled, Answer::Accepted), None);
    assert_eq!(play.sent(), Mark::Absent);
}

#[test]
fn what_was_accepted_counts_until_the_watch_shows_it_and_its_time_is_told() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    play.next().unwrap();
    let took = play
        .after(Duration::from_millis(7))
        .answer(Mark::Enabled, Answer::Accepted);
    assert_eq!(took, Some(Duration::from_millis(7)));
    play.look(None, Mark::Enabled);
    assert_eq!(play.next(), None, "the watch lags");
    play.look(Some("enabled"), Mark::Enabled);
    assert!(play.ledger.entries.is_empty());
    play.look(None, Mark::Enabled);
    assert_eq!(play.sent(), Mark::Enabled, "somebody has removed it");
}

#[test]
fn a_watch_that_is_quicker_than_the_answer_is_believed() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    play.next().unwrap();
    play.look(Some("enabled"), Mark::Enabled);
    play.answer(Mark::Enabled, Answer::Accepted);
    play.look(None, Mark::Enabled);
    assert_eq!(play.sent(), Mark::Enabled, "removed since");
}

#[test]
fn what_the_watch_never_shows_is_looked_at_again() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    play.next().unwrap();
    play.answer(Mark::Enabled, Answer::Accepted);
    assert_eq!(play.ledger.due(play.now), Some(play.now + LAG));
    play.after(LAG);
    assert_eq!(play.ledger.expired(play.now).1, [key("web")]);
    play.look(None, Mark::Enabled);
    assert_eq!(play.sent(), Mark::Enabled);
}

#[test]
fn an_attempt_that_failed_is_repeated_later_and_a_new_wish_at_once() {
    let mut play = Play::new();
    play.look(None, Mark::Pending);
    play.next().unwrap();
    play.answer(Mark::Pending, refused());
    play.look(None, Mark::Pending);
    assert_eq!(play.next(), None, "the same wish waits");
    assert_eq!(play.ledger.failed(), Some((1, "no".to_owned())));
    play.look(None, Mark::Enabled);
    assert_eq!(play.sent(), Mark::Enabled);
    play.answer(Mark::Enabled, Answer::Accepted);
    assert_eq!(play.ledger.failed(), None);
}

#[test]
fn the_waits_grow_to_half_a_minute_and_end_when_the_server_answers_again() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    for attempt in 0..12 {
        assert_eq!(play.sent(), Mark::Enabled);
        play.answer(Mark::Enabled, unanswered());
        let wait = play.ledger.due(play.now).unwrap() - play.now;
        let whole = WAITS[0].saturating_mul(1 << attempt.min(6)).min(WAITS[1]);
        assert!(wait >= whole / 2 && wait <= whole, "{attempt}: {wait:?}");
        play.after(wait);
    }
    play.next().unwrap();
    play.answer(Mark::Enabled, unanswered());
    assert_eq!(play.next(), None);
    play.ledger.hurry(play.now);
    assert_eq!(play.sent(), Mark::Enabled);
}

#[test]
fn a_pod_that_is_gone_is_not_asked_for_again() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    play.next().unwrap();
    play.answer(Mark::Enabled, Answer::Gone);
    play.look(None, Mark::Absent);
    assert_eq!((play.next(), play.ledger.unmet()), (None, 0));
    assert!(play.has_withdrawn(Some("enabled")));
    play.ledger.forget(&key("web"));
    assert!(play.ledger.entries.is_empty());
}

#[test]
fn an_answer_about_a_predecessor_says_nothing_of_its_successor() {
    let mut play = Play::new();
    play.look(None, Mark::Enabled);
    let order = play.next().unwrap();
    let uid = "successor".parse().unwrap();
    let look = Look {
        uid: &uid,
        shown: None,
        wish: Some(Mark::Enabled),
        serves_in: None,
    };
    play.ledger.look(&key("web"), &look, play.now);
    play.ledger.answered(&order, Answer::Gone, play.now);
    assert_eq!(play.next().unwrap().uid, uid);
}

#[test]
fn a_pod_has_withdrawn_when_that_is_accepted_or_shown_and_not_while_anything_is_under_way() {
    let mut play = Play::new();
    assert!(play.has_withdrawn(None) && !play.has_withdrawn(Some("enabled")));
    play.look(None, Mark::Enabled);
    assert!(!play.has_withdrawn(None), "`enabled` is to be sent");
    play.next().unwrap();
    assert!(!play.has_withdrawn(None), "`enabled` may arrive yet");
    play.look(None, Mark::Absent);
    play.answer(Mark::Enabled, unanswered());
    assert!(!play.has_withdrawn(None), "nobody knows whether it has");
    play.ledger.hurry(play.now);
    assert_eq!(play.sent(), Mark::Absent);
    assert!(!play.has_withdrawn(None));
    play.answer(Mark::Absent, Answer::Accepted);
    assert!(play.has_withdrawn(None));
}

#[test]
fn an_accepted_removal_counts_before_the_watch_shows_it_and_a_refused_one_does_not() {
    let mut play = Play::new();
    play.look(Some("enabled"), Mark::Absent);
    play.next().unwrap();
    play.answer(Mark::Absent, refused());
    assert!(!play.has_withdrawn(Some("enabled")));
    play.ledger.hurry(play.now);
    play.next().unwrap();
    play.answer(Mark::Absent, Answer::Accepted);
    assert!(play.has_withdrawn(Some("enabled")));
}

#[test]
fn eight_patches_are_under_way_at_once_and_the_oldest_wish_comes_first() {
    let mut play = Play::new();
    for number in (0..20).rev() {
        play.look_at(&format!("web-{number:02}"), None, Some(Mark::Enabled));
        play.after(Duration::from_millis(1));
    }
    let first = play.next().unwrap();
    assert_eq!(first.key, key("web-19"));
    let more = std::iter::from_fn(|| play.next()).count();
    assert_eq!(1 + more, AT_ONCE);
    assert_eq!(play.ledger.due(play.now), None, "an answer is waited for");
    play.ledger.answered(&first, Answer::Accepted, play.now);
    assert!(play.next().is_some() && play.next().is_none());
    assert_eq!(play.ledger.unmet(), 19);
}

#[test]
fn a_pod_that_serves_unannotated_is_told_of_after_ten_seconds_once_per_sandbox() {
    let mut play = Play::new();
    play.serves("c1", None);
    play.after(LATE - Duration::from_secs(1)).serves("c1", None);
    assert!(play.ledger.expired(play.now).0.is_empty());
    play.after(Duration::from_secs(1));
    assert_eq!(play.ledger.expired(play.now).0, [key("web")]);
    play.serves("c1", Some("enabled"));
    play.serves("c1", None);
    play.after(LATE);
    assert!(play.ledger.expired(play.now).0.is_empty(), "told once");
    play.serves("c2", None);
    play.after(LATE);
    assert_eq!(play.ledger.expired(play.now).0, [key("web")]);
}

#[test]
fn a_pod_that_is_annotated_in_time_is_not_told_of() {
    let mut play = Play::new();
    play.serves("c1", None);
    play.after(LATE / 2).serves("c1", Some("enabled"));
    assert!(play.ledger.entries.is_empty());
    play.serves("c1", None);
    play.after(LATE / 2);
    assert!(play.ledger.expired(play.now).0.is_empty());
}
