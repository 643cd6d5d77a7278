//! Checks the promises of pod-events: after each answer, at each moment, and at rest.

use std::sync::Arc;

use inpod_proto::types::v1::Enrollment;
use inpod_types::SandboxRef;

use super::node::{Node, Rules, Sandbox, SharedNode, index_of, sandbox_ref, uid};
use crate::{
    checkpoint::{Intent, Record},
    tasks::Registry,
};

pub(super) fn state_of(intent: &Intent) -> &'static str {
    match intent {
        Intent::Out => "out",
        Intent::Enrolling => "enrolling",
        Intent::Adopted => "adopted",
        Intent::Legacy | Intent::ServedLegacy => "legacy",
        Intent::Enrolled { .. } => "enrolled",
        Intent::Announcing => "announcing",
        Intent::Leaving { .. } => "leaving",
        Intent::Draining { .. } => "draining",
        Intent::Deleting { .. } => "deleting",
    }
}

fn is_enrolled(record: &Record) -> bool {
    matches!(record.intent, Intent::Enrolled { .. })
}

fn has_workload(node: &Node, index: usize) -> bool {
    let mut entries = node.broker.entries.keys();
    entries.any(|sandbox| index_of(&sandbox.container_id) == Some(index))
}

/// Returns a counter that grows with every change of a sandbox by anything but pod-events.
pub(super) fn disturbances(node: &SharedNode, index: usize) -> u32 {
    node.lock().sandboxes[index].disturbances
}

/// Checks that pod-events believes nothing without proof: ztunnel has acknowledged every sandbox that counts as
/// enrolled, for the sandbox's own netns.
pub(super) fn check_moment(node: &SharedNode, registry: &Registry) {
    let records = registry.records();
    let mut node = node.lock();
    for record in records.iter().filter(|record| is_enrolled(record)) {
        let Some(index) = index_of(&record.sandbox.container_id) else {
            continue;
        };
        let sandbox = &mut node.sandboxes[index];
        sandbox.enrolled = true;
        if !sandbox.acknowledged && !sandbox.sidecar {
            node.violate(format!(
                "c{index} counts as enrolled, ztunnel never acknowledged it"
            ));
        }
    }
    node.review_protection();
}

/// Checks that a sandbox whose ADD was answered with success is claimed, is served and has its rules.
pub(super) fn check_admitted(
    node: &SharedNode,
    registry: &Registry,
    index: usize,
    enrollment: Enrollment,
) {
    let record = registry.record(&sandbox_ref(index));
    let mut node = node.lock();
    let is_newest = node.newest(node.sandboxes[index].pod) == Some(index);
    let to_sidecar = enrollment == Enrollment::Sidecar;
    if !(to_sidecar || enrollment == Enrollment::Ambient) || !is_newest {
        return;
    }
    if node.sandboxes[index].sidecar != to_sidecar {
        node.violate(format!("the ADD of c{index} was answered {enrollment:?}"));
    }
    let sandbox = &node.sandboxes[index];
    let lacks = [
        ("rules", sandbox.rules == Some(Rules::Complete)),
        (
            "claim",
            node.is_claimed(index) || is_detached(&node, sandbox),
        ),
        ("listeners", node.is_served(index) || sandbox.sidecar),
        (
            "record",
            record.is_some_and(|record| record.intent.was_in_mesh()),
        ),
    ];
    for (what, _) in lacks.into_iter().filter(|(_, is_there)| !is_there) {
        node.violate(format!(
            "the ADD of c{index} was answered with success, without its {what}"
        ));
    }
}

/// Checks that a sandbox without a record has nothing in place after a failed ADD, or after a DEL that was not
/// deferred.
pub(super) fn check_forgotten(node: &SharedNode, registry: &Registry, index: usize, after: &str) {
    if registry.record(&sandbox_ref(index)).is_some() {
        return;
    }
    let mut node = node.lock();
    let sandbox = &node.sandboxes[index];
    if sandbox.admitted.is_none() {
        // The runtime repeats the ADD.
        return;
    }
    let ends_with_netns = after == "DEL" || !sandbox.exists();
    let left = [
        ("rules", sandbox.rules.is_some() && !ends_with_netns),
        (
            "claim",
            node.netconfig.claims.contains_key(&sandbox_ref(index)),
        ),
        (
            "workload",
            node.broker.entries.contains_key(&sandbox_ref(index)),
        ),
    ];
    for (what, _) in left.into_iter().filter(|(_, is_left)| *is_left) {
        node.violate(format!(
            "after its {after}, c{index} has no record and still its {what}"
        ));
    }
}

/// Returns whether an uninstall leaves the redirection to a sidecar in place without a claim.
fn is_detached(node: &Node, sandbox: &Sandbox) -> bool {
    sandbox.sidecar && node.is_uninstalled()
}

/// Checks that CHECK reports the actual state.
pub(super) fn check_reported(node: &SharedNode, index: usize) {
    let mut node = node.lock();
    let complete = node.sandboxes[index].rules == Some(Rules::Complete);
    if !complete || !node.is_served(index) {
        node.violate(format!("CHECK reports c{index} as enrolled, and it is not"));
    }
}

/// Returns the first violation of rest: a difference between desired and observed state, or a leftover.
pub(super) fn find_unrest(node: &SharedNode, registry: &Registry) -> Option<String> {
    let records = registry.records();
    let node = node.lock();
    for record in &records {
        let index = index_of(&record.sandbox.container_id);
        // pod-events searches for a shown pod without a sandbox as long as the source shows the pod.
        let may_stay = index.map_or_else(
            || record.has_unknown_netns() && is_awaited(&node, record),
            |index| is_superseded(&node, index),
        );
        if may_stay {
            continue;
        }
        if !matches!(record.intent, Intent::Out | Intent::Enrolled { .. }) {
            let state = state_of(&record.intent);
            return Some(format!("{} stays {state}", record.sandbox));
        }
    }
    let of_index = |index| {
        let mut records = records.iter();
        records.rfind(|record| index_of(&record.sandbox.container_id) == Some(index))
    };
    let sandboxes = 0..node.sandboxes.len();
    let unrest = |index| {
        let record = of_index(index).map(|record| &**record);
        unrest_of(&node, index, record, &records)
    };
    let found = sandboxes.filter_map(unrest).next();
    let awaited = |sandbox: &SandboxRef| {
        let mut records = records.iter();
        records.any(|record| record.sandbox == *sandbox)
    };
    found.or_else(|| find_leftover(&node, awaited))
}

/// Returns whether the runtime has started another sandbox although the given sandbox runs: the earlier sandbox stays
/// unchanged until its end.
fn is_superseded(node: &Node, index: usize) -> bool {
    let sandbox = &node.sandboxes[index];
    node.newest(sandbox.pod) != Some(index) && sandbox.exists()
}

/// Returns whether the record belongs to a shown pod whose sandbox has ended.
fn is_awaited(node: &Node, record: &Record) -> bool {
    let pods = node.pods.iter().enumerate();
    let mut shown = pods.filter(|(_, pod)| pod.shown);
    shown.any(|(index, pod)| {
        let runs = node.newest(index).is_some_and(|it| node.sandboxes[it].app);
        uid(index, pod.generation) == record.pod.uid.as_str() && !runs
    })
}

fn is_last(records: &[Arc<Record>], record: &Record) -> bool {
    let of_pod = records.iter().filter(|known| known.pod == record.pod);
    of_pod.map(|known| known.revision).max() == Some(record.revision)
}

fn unrest_of(
    node: &Node,
    index: usize,
    record: Option<&Record>,
    records: &[Arc<Record>],
) -> Option<String> {
    let sandbox = &node.sandboxes[index];
    let pod = &node.pods[sandbox.pod];
    let enrolled = record.is_some_and(is_enrolled);
    let is_newest = node.newest(sandbox.pod) == Some(index);
    // A pod may wait for its next sandbox while nothing is held for the ended sandbox: netconfig reports only the end
    // of claimed sandboxes, and a search for the processes of all others takes time in proportion to the processes of
    // the node. The DEL, the next ADD, the end of the pod or the end of the uninstall ends the record.
    let is_shown = pod.shown && pod.generation == sandbox.generation;
    let is_left_alone = is_detached(node, sandbox);
    let is_unmanaged =
        |record: &Record| record.intent == Intent::Out || (record.is_detached() && is_left_alone);
    let waits =
        is_shown && record.is_some_and(|record| is_unmanaged(record) && is_last(records, record));
    if !sandbox.exists() && record.is_some() {
        return if waits {
            left_outside(node, index, is_newest)
        } else {
            Some(format!("c{index} has ended and still has a record"))
        };
    }
    if is_superseded(node, index) && record.is_some() {
        return None;
    }
    // A DEL of the newest of two running sandboxes makes the other sandbox the pod's.
    let mut others = node.sandboxes.iter().take(index);
    let is_replaced = sandbox.delete_requested
        && others.any(|other| other.pod == sandbox.pod && other.has_processes());
    if is_replaced && record.is_none() {
        return None;
    }
    let runs = sandbox.app && sandbox.is_mounted && pod.address_of == Some(index);
    if runs && is_newest && node.is_wanted(index) && !enrolled {
        let state = record.map_or("not recorded", |record| state_of(&record.intent));
        return Some(format!("c{index} should be enrolled and is {state}"));
    }
    let may = is_shown && node.may_join(pod) && !pod.terminal;
    // The redirection to a sidecar stays until the sandbox ends.
    if enrolled && is_newest && !may && !sandbox.sidecar {
        return Some(format!("c{index} should not be enrolled"));
    }
    let is_annotated = runs && is_shown && is_newest && !pod.terminating && node.has_api_server;
    let is_served = enrolled && !sandbox.sidecar;
    if is_annotated && pod.is_announced() != is_served {
        return Some(format!("c{index} has the annotation {:?}", pod.annotation));
    }
    if enrolled {
        let served = if sandbox.sidecar {
            !has_workload(node, index)
        } else {
            !is_newest || (node.is_served(index) && has_workload(node, index))
        };
        let in_place = [
            sandbox.rules == Some(Rules::Complete),
            node.is_claimed(index) || is_detached(node, sandbox),
            served,
        ];
        let lacks = in_place != [true; 3];
        return lacks
            .then(|| format!("c{index} is enrolled with rules, claim, listeners {in_place:?}"));
    }
    left_outside(node, index, is_newest)
}

fn left_outside(node: &Node, index: usize, is_newest: bool) -> Option<String> {
    let sandbox = &node.sandboxes[index];
    // With the source's agreement, a DEL ends a sandbox at once, even if the source shows the pod again later. The
    // rules end with the netns.
    let ends = !sandbox.app || !is_newest || sandbox.end_confirmed;
    // The runtime deletes a sandbox whose ADD failed.
    let has_failed = sandbox.admitted == Some(false) && !sandbox.app;
    let rules_may_stay = !sandbox.has_processes()
        || has_failed
        || (sandbox.delete_requested && ends)
        || sandbox.sidecar;
    let left = [
        sandbox.rules.is_some() && !rules_may_stay,
        node.is_claimed(index),
        has_workload(node, index),
    ];
    let leaves = left != [false; 3];
    leaves.then(|| format!("c{index} is outside and still has rules, claim, workload {left:?}"))
}

fn find_leftover(node: &Node, is_recorded: impl Fn(&SandboxRef) -> bool) -> Option<String> {
    let is_foreign =
        |sandbox: &&SandboxRef| index_of(&sandbox.container_id).is_none() && !is_recorded(sandbox);
    let mut entries = node.broker.entries.keys();
    let kept = entries.find(is_foreign)?;
    Some(format!("the desired set keeps {kept}"))
}
