use super::*;
use crate::fixture::{descriptor, sandbox, uid, workload};

fn seeded(all: Vec<Workload>) -> Desired {
    let mut desired = Desired::default();
    let highest = all.iter().map(|w| w.revision).max().unwrap_or_default();
    desired.set(highest, all, Instant::now());
    desired
}

fn holds(desired: &Desired) -> Vec<&str> {
    let ids = desired
        .entries()
        .map(|it| &it.workload.sandbox.container_id);
    ids.map(inpod_types::ContainerId::as_str).collect()
}

fn add(desired: &mut Desired, it: Workload) -> Result<(), Reason> {
    let inode = it.netns.unwrap().inode;
    let added = desired.add(it, descriptor(inode), Instant::now());
    added.map_err(|failure| failure.reason)
}

fn remove(desired: &mut Desired, container: &str, revision: u64) -> Result<(), Reason> {
    let removed = desired.remove(&sandbox(container), Revision(revision));
    removed.map_err(|failure| failure.reason)
}

#[test]
fn nothing_can_be_added_or_removed_before_the_set_is_known() {
    let mut desired = Desired::default();
    let added = add(&mut desired, workload("c1", "p", 1, 1));
    assert_eq!(added, Err(Reason::NotSeeded));
    let removed = remove(&mut desired, "c1", 1);
    assert_eq!(removed, Err(Reason::NotSeeded));
}

#[test]
fn a_set_replaces_what_it_does_not_name() {
    let mut desired = seeded(vec![workload("c1", "p", 1, 1), workload("c2", "q", 2, 2)]);
    desired.set(Revision(3), vec![workload("c2", "q", 2, 2)], Instant::now());
    assert_eq!(holds(&desired), ["c2"]);
}

#[test]
fn a_set_does_not_take_back_a_later_add() {
    let mut desired = seeded(vec![]);
    add(&mut desired, workload("c1", "p", 1, 9)).unwrap();
    desired.set(Revision(8), vec![], Instant::now());
    assert_eq!(holds(&desired), ["c1"]);
}

#[test]
fn a_set_does_not_bring_back_what_was_removed_later() {
    let mut desired = seeded(vec![workload("c1", "p", 1, 1)]);
    remove(&mut desired, "c1", 2).unwrap();
    desired.set(Revision(1), vec![workload("c1", "p", 1, 1)], Instant::now());
    assert!(holds(&desired).is_empty());
}

#[test]
fn an_older_add_or_remove_is_stale() {
    let mut desired = seeded(vec![workload("c1", "p", 1, 5)]);
    let added = add(&mut desired, workload("c1", "p", 1, 4));
    assert_eq!(added, Err(Reason::RevisionStale));
    let removed = remove(&mut desired, "c1", 4);
    assert_eq!(removed, Err(Reason::RevisionStale));
}

#[test]
fn an_add_that_was_overtaken_by_the_removal_is_stale() {
    let mut desired = seeded(vec![]);
    remove(&mut desired, "c1", 2).unwrap();
    let added = add(&mut desired, workload("c1", "p", 1, 1));
    assert_eq!(added, Err(Reason::RevisionStale));
}

#[test]
fn the_removal_of_an_old_sandbox_leaves_the_pod_to_the_new_one() {
    let mut desired = seeded(vec![workload("old", "p", 1, 1)]);
    add(&mut desired, workload("new", "p", 2, 2)).unwrap();
    remove(&mut desired, "old", 3).unwrap();
    let current = desired.current(&uid("p")).unwrap();
    assert_eq!(current.workload.sandbox, sandbox("new"));
}

#[test]
fn an_old_sandbox_cannot_take_its_pod_back() {
    let mut desired = seeded(vec![workload("new", "p", 2, 2)]);
    let added = add(&mut desired, workload("old", "p", 1, 1));
    assert_eq!(added, Err(Reason::RevisionStale));
}

#[test]
fn a_set_without_the_netns_does_not_unlearn_it() {
    let mut desired = seeded(vec![]);
    add(&mut desired, workload("c1", "p", 1, 1)).unwrap();
    let since = desired.current(&uid("p")).unwrap().since;
    desired.set(Revision(1), vec![workload("c1", "p", 0, 1)], Instant::now());
    assert_eq!(desired.current(&uid("p")).unwrap().since, since);
    assert!(desired.current(&uid("p")).unwrap().descriptor.is_some());
}

#[test]
fn a_descriptor_of_another_netns_is_not_kept() {
    let mut desired = seeded(vec![workload("c1", "p", 1, 1)]);
    desired.store(&sandbox("c1"), descriptor(2));
    assert_eq!(desired.missing().count(), 1);
    desired.store(&sandbox("c1"), descriptor(1));
    assert_eq!(desired.missing().count(), 0);
}

#[test]
fn the_oldest_removals_are_forgotten_first() {
    let mut desired = seeded(vec![]);
    let removals = u64::try_from(MAX_TOMBSTONES).unwrap() + 1;
    for n in 1..=removals {
        remove(&mut desired, &format!("c{n}"), 2 * n).unwrap();
    }
    assert_eq!(desired.tombstones.revisions.len(), MAX_TOMBSTONES);
    assert_eq!(add(&mut desired, workload("c1", "p", 1, 1)), Ok(()));
    let late = add(&mut desired, workload("c2", "q", 1, 1));
    assert_eq!(late, Err(Reason::RevisionStale));
}
