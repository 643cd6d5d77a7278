use super::*;

fn seen(key: &'static str, version: u64, value: u32) -> Seen<&'static str, u32> {
    Seen {
        title: key.to_owned(),
        version,
        parsed: Ok((key, value)),
    }
}

fn broken(key: &'static str, version: u64) -> Seen<&'static str, u32> {
    Seen {
        title: key.to_owned(),
        version,
        parsed: Err("it is odd".to_owned()),
    }
}

/// A layer after a list at version 10.
fn layer() -> Layer<&'static str, u32> {
    let mut layer = Layer::new();
    layer.begin_list();
    layer.list(seen("a", 4, 1));
    layer.list(seen("b", 10, 1));
    layer.finish_list(10);
    layer
}

fn known(layer: &Layer<&'static str, u32>) -> Vec<(&'static str, u32)> {
    let known = layer.known().iter();
    let mut known: Vec<_> = known.map(|(key, value)| (*key, *value)).collect();
    known.sort_unstable();
    known
}

#[test]
fn nothing_of_a_list_is_known_before_it_is_whole() {
    let mut layer = Layer::new();
    layer.begin_list();
    layer.list(seen("a", 4, 1));
    assert_eq!(
        (known(&layer), layer.progress()),
        (vec![], &Progress::Listing)
    );
    layer.finish_list(4);
    assert_eq!(
        (known(&layer), layer.progress()),
        (vec![("a", 1)], &Progress::InSync)
    );
}

#[test]
fn a_second_list_replaces_the_first_at_once_and_one_that_breaks_off_changes_nothing() {
    let mut layer = layer();
    layer.begin_list();
    layer.list(seen("c", 12, 1));
    layer.lose("gone".to_owned());
    assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
    layer.begin_list();
    layer.list(seen("d", 13, 1));
    assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
    assert_eq!(layer.progress(), &Progress::Lost("gone".to_owned()));
    layer.finish_list(13);
    assert_eq!(known(&layer), [("d", 1)]);
    assert_eq!(layer.progress(), &Progress::InSync);
}

#[test]
fn what_was_asked_for_holds_until_the_watch_has_come_as_far() {
    let mut layer = layer();
    layer.learn("c", 15, 2);
    layer.apply(seen("a", 12, 7));
    assert_eq!(known(&layer), [("a", 7), ("b", 1), ("c", 2)]);
    layer.apply(seen("c", 15, 3));
    assert_eq!(known(&layer), [("a", 7), ("b", 1), ("c", 3)]);
}

#[test]
fn what_changes_nothing_is_not_told() {
    let told = |objects, gaps| News { objects, gaps };
    let mut layer = layer();
    assert_eq!(layer.news(), told(true, true));
    layer.apply(seen("a", 12, 1));
    layer.begin_list();
    layer.list(seen("c", 12, 1));
    layer.delete(seen("z", 13, 1));
    assert_eq!(layer.news(), told(false, false));
    layer.apply(seen("a", 13, 2));
    assert_eq!(layer.news(), told(true, false));
    layer.apply(broken("b", 14));
    assert_eq!(layer.news(), told(false, true));
    // A list that says what is known already is no news of objects.
    layer.begin_list();
    for (key, value) in [("b", 1), ("a", 2)] {
        layer.list(seen(key, 14, value));
    }
    layer.finish_list(14);
    assert_eq!(layer.news(), told(false, true));
}

#[test]
fn an_answer_that_comes_after_the_watch_has_passed_it_is_not_kept() {
    let mut layer = layer();
    layer.apply(seen("c", 15, 3));
    layer.delete(seen("c", 16, 3));
    layer.learn("c", 15, 2);
    assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
}

#[test]
fn a_pod_that_was_asked_for_and_is_deleted_does_not_stay() {
    let mut told = layer();
    told.learn("c", 15, 2);
    told.delete(seen("c", 17, 2));
    assert_eq!(known(&told), [("a", 1), ("b", 1)]);
    let mut passed = layer();
    passed.learn("c", 15, 2);
    passed.apply(seen("a", 18, 2));
    assert_eq!(known(&passed), [("a", 2), ("b", 1)]);
    // Where the watch is silent it is asked for again.
    let mut silent = layer();
    silent.learn("c", 15, 2);
    assert_eq!(silent.unconfirmed(), ["c"]);
    silent.unlearn(&"c");
    assert_eq!(known(&silent), [("a", 1), ("b", 1)]);
}

#[test]
fn a_successor_that_was_asked_for_outlives_the_late_news_of_its_predecessors_end() {
    let mut layer = layer();
    layer.learn("b", 20, 2);
    layer.delete(seen("b", 19, 1));
    assert_eq!(known(&layer), [("a", 1), ("b", 2)]);
}

#[test]
fn an_object_that_cannot_be_used_keeps_what_it_said_and_is_named() {
    let mut layer = layer();
    layer.apply(broken("a", 11));
    assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
    assert_eq!(layer.unusable(), &BTreeSet::from(["a".to_owned()]));
    layer.apply(seen("a", 12, 2));
    assert_eq!(layer.unusable(), &BTreeSet::new());
}

#[test]
fn a_list_below_what_was_asked_for_leaves_it_the_later_word_and_is_known_beneath() {
    let mut layer = layer();
    layer.learn("a", 20, 2);
    layer.begin_list();
    layer.list(seen("a", 12, 3));
    layer.list(seen("b", 10, 1));
    layer.finish_list(12);
    assert_eq!(known(&layer), [("a", 2), ("b", 1)]);
    layer.unlearn(&"a");
    assert_eq!(known(&layer), [("a", 3), ("b", 1)]);
}

#[test]
fn after_a_list_what_is_not_above_it_is_not_the_later_word() {
    let mut layer = layer();
    layer.learn("a", 12, 2);
    layer.begin_list();
    layer.list(seen("b", 10, 1));
    // "a" was deleted at 13.
    layer.finish_list(14);
    layer.learn("a", 13, 2);
    assert_eq!(known(&layer), [("b", 1)]);
    layer.learn("a", 15, 3);
    assert_eq!(known(&layer), [("a", 3), ("b", 1)]);
}

#[test]
fn a_list_of_a_server_that_was_put_back_is_the_last_word_on_all_and_is_followed_by_others() {
    let mut layer = layer();
    layer.apply(seen("b", 5000, 7));
    layer.learn("c", 5001, 7);
    layer.begin_list();
    layer.list(seen("a", 4, 1));
    layer.finish_list(11);
    assert_eq!(known(&layer), [("a", 1)]);
    layer.learn("d", 12, 1);
    assert_eq!(known(&layer), [("a", 1), ("d", 1)]);
    layer.apply(seen("d", 13, 2));
    assert_eq!(known(&layer), [("a", 1), ("d", 2)]);
    assert_eq!(layer.unconfirmed(), [""; 0]);
}

#[test]
fn of_two_answers_the_later_holds_and_what_the_watch_said_returns_after_both() {
    let mut layer = layer();
    layer.learn("a", 15, 2);
    layer.learn("a", 18, 3);
    layer.apply(seen("b", 16, 1));
    assert_eq!(known(&layer), [("a", 3), ("b", 1)]);
    layer.apply(seen("a", 17, 4));
    assert_eq!(known(&layer), [("a", 3), ("b", 1)]);
    layer.apply(seen("b", 18, 1));
    assert_eq!(known(&layer), [("a", 4), ("b", 1)]);
    assert!(layer.unconfirmed().is_empty());
}

/// Counts how often it is copied, hashed and compared.
#[derive(Debug)]
struct Counted(u32);

thread_local! {
    static TOUCHED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

fn touch() {
    TOUCHED.set(TOUCHED.get() + 1);
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        touch();
        Self(self.0)
    }
}

impl PartialEq for Counted {
    fn eq(&self, other: &Self) -> bool {
        touch();
        self.0 == other.0
    }
}

impl Eq for Counted {}

impl PartialOrd for Counted {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Counted {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        touch();
        self.0.cmp(&other.0)
    }
}

impl Hash for Counted {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        touch();
        self.0.hash(state);
    }
}

/// What is done to keys and values of a layer of so many objects when one of them changes, is asked for, confirmed and
/// deleted, each with a snapshot and what changed since the one before.
fn cost_in(objects: u32) -> u32 {
    let seen = |key, version, value| Seen {
        title: "object".to_owned(),
        version,
        parsed: Ok((Counted(key), Counted(value))),
    };
    let mut layer = Layer::new();
    layer.begin_list();
    (0..objects).for_each(|key| layer.list(seen(key, 1, 0)));
    layer.finish_list(1);
    let mut before = layer.known().clone();
    let mut told = |layer: &Layer<Counted, Counted>| {
        let now = layer.known().clone();
        let changed = now.differences(&before).len();
        before = now;
        changed
    };
    TOUCHED.set(0);
    layer.apply(seen(objects / 2, 2, 1));
    assert_eq!(told(&layer), 1);
    layer.learn(Counted(objects), 4, Counted(1));
    assert_eq!(told(&layer), 1);
    layer.apply(seen(objects, 4, 1));
    assert_eq!(told(&layer), 0);
    layer.delete(seen(objects / 2, 5, 1));
    assert_eq!(told(&layer), 1);
    TOUCHED.get()
}

#[test]
fn an_event_costs_no_more_among_ten_thousand_objects_than_among_a_leaf_full() {
    let few = cost_in(16);
    for objects in [1_000, 10_000] {
        let cost = cost_in(objects);
        assert!(cost <= few.max(200), "{objects}: {cost}, of 16: {few}");
    }
}

#[test]
fn a_watch_that_goes_on_where_it_stood_is_in_step_again_with_what_it_knew() {
    let mut layer = layer();
    layer.lose("gone".to_owned());
    layer.news();
    layer.resume();
    let gaps = News {
        objects: false,
        gaps: true,
    };
    assert_eq!((layer.news(), layer.progress()), (gaps, &Progress::InSync));
    layer.resume();
    assert_eq!(layer.news(), News::default());
    assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
}
