use super::*;

fn observed(key: &'static str, version: u64, value: u32) -> Observed<&'static str, u32> {
    Observed {
        title: key.to_owned(),
        version,
        parsed: Ok((key, value)),
    }
}

fn broken(key: &'static str, version: u64) -> Observed<&'static str, u32> {
    Observed {
        title: key.to_owned(),
        version,
        parsed: Err("it is odd".to_owned()),
    }
}

fn store() -> Store<&'static str, u32> {
    let mut store = Store::new();
    store.begin_list();
    store.add_listed(observed("a", 4, 1));
    store.add_listed(observed("b", 10, 1));
    store.finish_list(10);
    store
}

fn known(store: &Store<&'static str, u32>) -> Vec<(&'static str, u32)> {
    let objects = store.objects();
    let mut known: Vec<_> = objects.iter().map(|(key, value)| (*key, *value)).collect();
    known.sort_unstable();
    known
}

#[test]
fn nothing_of_a_list_is_known_before_it_is_whole() {
    let mut store = Store::new();
    store.begin_list();
    store.add_listed(observed("a", 4, 1));
    assert_eq!(
        (known(&store), store.progress()),
        (vec![], &Progress::Listing)
    );
    store.finish_list(4);
    assert_eq!(
        (known(&store), store.progress()),
        (vec![("a", 1)], &Progress::InSync)
    );
}

#[test]
fn a_second_list_replaces_the_first_at_once_and_an_interrupted_one_changes_nothing() {
    let mut store = store();
    store.begin_list();
    store.add_listed(observed("c", 12, 1));
    store.set_progress(Progress::Lost("gone".to_owned()));
    assert_eq!(known(&store), [("a", 1), ("b", 1)]);
    store.begin_list();
    store.add_listed(observed("d", 13, 1));
    assert_eq!(known(&store), [("a", 1), ("b", 1)]);
    assert_eq!(store.progress(), &Progress::Lost("gone".to_owned()));
    store.finish_list(13);
    assert_eq!(known(&store), [("d", 1)]);
    assert_eq!(store.progress(), &Progress::InSync);
}

#[test]
fn a_fetched_object_counts_until_the_watch_has_reached_its_version() {
    let mut store = store();
    store.insert_fetched("c", 15, 2);
    store.apply(observed("a", 12, 7));
    assert_eq!(known(&store), [("a", 7), ("b", 1), ("c", 2)]);
    store.apply(observed("c", 15, 3));
    assert_eq!(known(&store), [("a", 7), ("b", 1), ("c", 3)]);
}

#[test]
fn an_object_that_is_fetched_after_the_watch_has_passed_it_is_not_kept() {
    let mut store = store();
    store.apply(observed("c", 15, 3));
    store.delete(observed("c", 16, 3));
    store.insert_fetched("c", 15, 2);
    assert_eq!(known(&store), [("a", 1), ("b", 1)]);
}

#[test]
fn a_fetched_pod_that_is_deleted_does_not_stay() {
    let mut deleted = store();
    deleted.insert_fetched("c", 15, 2);
    deleted.delete(observed("c", 17, 2));
    assert_eq!(known(&deleted), [("a", 1), ("b", 1)]);
    let mut passed = store();
    passed.insert_fetched("c", 15, 2);
    passed.apply(observed("a", 18, 2));
    assert_eq!(known(&passed), [("a", 2), ("b", 1)]);
    // While the watch is silent the object is fetched again.
    let mut silent = store();
    silent.insert_fetched("c", 15, 2);
    assert_eq!(silent.unconfirmed(), ["c"]);
    silent.remove_fetched(&"c");
    assert_eq!(known(&silent), [("a", 1), ("b", 1)]);
}

#[test]
fn a_fetched_successor_outlives_the_late_deletion_of_its_predecessor() {
    let mut store = store();
    store.insert_fetched("b", 20, 2);
    store.delete(observed("b", 19, 1));
    assert_eq!(known(&store), [("a", 1), ("b", 2)]);
}

#[test]
fn an_object_that_cannot_be_used_keeps_its_previous_version_and_is_named() {
    let mut store = store();
    store.apply(broken("a", 11));
    assert_eq!(known(&store), [("a", 1), ("b", 1)]);
    assert_eq!(store.unusable(), &BTreeSet::from(["a".to_owned()]));
    store.apply(observed("a", 12, 2));
    assert_eq!(store.unusable(), &BTreeSet::new());
}

#[test]
fn a_list_older_than_a_fetched_object_does_not_replace_it_and_shows_when_it_is_removed() {
    let mut store = store();
    store.insert_fetched("a", 20, 2);
    store.begin_list();
    store.add_listed(observed("a", 12, 3));
    store.add_listed(observed("b", 10, 1));
    store.finish_list(12);
    assert_eq!(known(&store), [("a", 2), ("b", 1)]);
    store.remove_fetched(&"a");
    assert_eq!(known(&store), [("a", 3), ("b", 1)]);
}

#[test]
fn after_a_list_fetched_objects_of_older_versions_are_dropped() {
    let mut store = store();
    store.insert_fetched("a", 12, 2);
    store.begin_list();
    store.add_listed(observed("b", 10, 1));
    // "a" was deleted at 13.
    store.finish_list(14);
    store.insert_fetched("a", 13, 2);
    assert_eq!(known(&store), [("b", 1)]);
    store.insert_fetched("a", 15, 3);
    assert_eq!(known(&store), [("a", 3), ("b", 1)]);
}

#[test]
fn a_list_of_a_restored_server_replaces_everything_and_later_versions_follow_it() {
    let mut store = store();
    store.apply(observed("b", 5000, 7));
    store.insert_fetched("c", 5001, 7);
    store.begin_list();
    store.add_listed(observed("a", 4, 1));
    store.finish_list(11);
    assert_eq!(known(&store), [("a", 1)]);
    store.insert_fetched("d", 12, 1);
    assert_eq!(known(&store), [("a", 1), ("d", 1)]);
    store.apply(observed("d", 13, 2));
    assert_eq!(known(&store), [("a", 1), ("d", 2)]);
    assert_eq!(store.unconfirmed(), [""; 0]);
}

#[test]
fn of_two_fetched_versions_the_later_wins_and_the_watch_replaces_both() {
    let mut store = store();
    store.insert_fetched("a", 15, 2);
    store.insert_fetched("a", 18, 3);
    store.apply(observed("b", 16, 1));
    assert_eq!(known(&store), [("a", 3), ("b", 1)]);
    store.apply(observed("a", 17, 4));
    assert_eq!(known(&store), [("a", 3), ("b", 1)]);
    store.apply(observed("b", 18, 1));
    assert_eq!(known(&store), [("a", 4), ("b", 1)]);
    assert!(store.unconfirmed().is_empty());
}
