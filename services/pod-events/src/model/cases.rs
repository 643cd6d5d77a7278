//! Schedules worth a name: each was a defect once, or tests a promise that only several parts together keep.

use std::time::Duration;

use inpod_service::UninstallMode;

use super::{
    life::play,
    node::{Disk, Fault, Method, Patching, Ztunnel},
    schedule::Op,
};

const WAIT: Op = Op::Wait { millis: 1000 };

/// A wait longer than the lifetime of any evidence of an earlier state.
const SETTLED: Op = Op::Wait { millis: 20_000 };

const DELETE: Op = Op::Delete { back: 0 };

fn start(labelled: bool, previous_ends: bool) -> Op {
    Op::Start {
        pod: 0,
        labelled,
        previous_ends,
        reuses_path: false,
        timeout: 30,
        leaves_after: None,
        cleans_up: false,
    }
}

fn fault(method: Method, fault: Fault) -> Op {
    Op::Fault { method, fault }
}

/// Plays a schedule and asserts that every state is as desired afterwards.
fn assert_holds(ops: &[Op]) {
    let played = play(ops, true);
    let trace = played.trace.join("\n");
    assert_eq!(played.violation, None, "{ops:#?}\n{trace}");
}

fn assert_deletes_at_once(ops: &[Op]) {
    assert_holds(ops);
    let took = play(ops, false).reached.slowest_delete;
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_pod_that_runs_on_after_a_wrong_del_is_enrolled_again() {
    assert_holds(&[start(true, false), SETTLED, DELETE]);
}

#[test]
fn a_pod_that_a_gc_has_wrongly_left_out_is_enrolled_again() {
    assert_holds(&[start(true, false), SETTLED, Op::Collect { listed: 0 }]);
}

#[test]
fn after_a_wrong_del_rules_are_repaired_again() {
    assert_holds(&[
        start(true, false),
        SETTLED,
        DELETE,
        WAIT,
        Op::Tear { back: 0 },
    ]);
}

#[test]
fn after_a_wrong_del_a_pod_can_leave_the_mesh() {
    let unlabel = Op::Label {
        pod: 0,
        labelled: false,
    };
    assert_holds(&[start(true, false), SETTLED, DELETE, WAIT, unlabel]);
}

#[test]
fn a_wrong_del_survives_a_crash_and_is_rejected_all_the_same() {
    let crash = Op::Crash {
        steps: 0,
        missed: 0,
    };
    assert_holds(&[start(true, false), SETTLED, DELETE, WAIT, crash, WAIT]);
}

#[test]
fn a_del_alone_ends_no_sandbox_in_which_a_shown_pod_runs() {
    let minute = Op::Wait { millis: 65_000 };
    assert_holds(&[start(true, false), SETTLED, DELETE, minute]);
}

#[test]
fn repeated_wrong_dels_do_not_keep_a_pod_from_being_enrolled_again() {
    let repeated = Op::Wait { millis: 20_000 };
    let mut ops = vec![start(true, false), SETTLED, DELETE];
    ops.extend([repeated, DELETE].repeat(2));
    ops.push(Op::Wait { millis: 27_000 });
    ops.push(DELETE);
    // The first DEL is a minute ago.
    assert_eq!(
        play(&ops, false).reached.pairs.get(&("enrolled", "DEL")),
        Some(&2)
    );
}

#[test]
fn an_add_with_the_container_of_another_pod_changes_nothing_of_that() {
    let confuse = Op::Confuse { back: 0 };
    assert_holds(&[start(true, false), SETTLED, confuse, SETTLED]);
    assert_holds(&[start(true, false), confuse, SETTLED]);
}

#[test]
fn records_of_replaced_sandboxes_go_also_outside_the_mesh() {
    assert_holds(&[
        start(false, false),
        WAIT,
        start(false, true),
        WAIT,
        start(false, true),
    ]);
}

#[test]
fn a_restarted_broker_is_sent_a_pods_newest_sandbox() {
    let restart = Op::RestartBroker { down: 0 };
    let again = start(true, false);
    assert_holds(&[start(true, false), WAIT, again, SETTLED, restart]);
}

#[test]
fn a_deleted_sandbox_is_forgotten_only_once_the_broker_knows() {
    let stop = Op::Stop {
        back: 0,
        deletes: true,
    };
    let refused = fault(Method::RemoveWorkload, Fault::Refused);
    assert_holds(&[start(true, false), WAIT, refused, stop]);
}

#[test]
fn a_del_does_not_wait_for_an_add_that_waits_for_ztunnel() {
    let silent = Op::Ztunnel {
        mode: Ztunnel::Silent,
    };
    assert_deletes_at_once(&[silent, start(true, false), WAIT, DELETE, SETTLED]);
}

#[test]
fn a_del_does_not_wait_for_a_claim_that_netconfig_does_not_answer() {
    for hangs in [Fault::Hangs, Fault::AnswerHangs] {
        let hangs = fault(Method::Claim, hangs);
        assert_deletes_at_once(&[WAIT, hangs, start(true, false), WAIT, DELETE]);
    }
}

#[test]
fn a_del_does_not_wait_for_rules_whose_application_netconfig_does_not_answer() {
    for hangs in [Fault::Hangs, Fault::AnswerHangs] {
        let hangs = fault(Method::Apply, hangs);
        assert_deletes_at_once(&[WAIT, hangs, start(true, false), WAIT, DELETE]);
    }
}

#[test]
fn what_a_cancelled_add_is_having_applied_is_undone_once_it_is() {
    let late = fault(Method::Apply, Fault::Late(1500));
    assert_holds(&[WAIT, late, start(true, false), WAIT, DELETE, WAIT]);
}

#[test]
fn the_del_of_an_earlier_sandbox_does_not_wait_for_the_add_of_the_next() {
    let silent = Op::Ztunnel {
        mode: Ztunnel::Silent,
    };
    let next = start(true, false);
    let earlier = Op::Delete { back: 1 };
    assert_deletes_at_once(&[start(true, false), WAIT, silent, next, WAIT, earlier, WAIT]);
}

#[test]
fn a_failed_add_leaves_no_rules() {
    let lost = fault(Method::Apply, Fault::AnswerLost);
    assert_holds(&[lost, start(true, false)]);
}

#[test]
fn what_a_failed_add_could_not_undo_is_undone_later_although_the_disk_was_full() {
    assert_holds(&[
        fault(Method::Apply, Fault::AnswerLate(1500)),
        fault(Method::RemoveRules, Fault::Refused),
        fault(Method::Release, Fault::Refused),
        start(true, false),
        WAIT,
        Op::Disk { disk: Disk::Full },
        WAIT,
    ]);
}

#[test]
fn a_repeated_add_that_fails_leaves_no_withdrawal_half_done() {
    let unlabel = Op::Label {
        pod: 0,
        labelled: false,
    };
    let label = Op::Label {
        pod: 0,
        labelled: true,
    };
    let repeat = Op::Repeat {
        back: 0,
        timeout: 5,
    };
    let refused = fault(Method::Apply, Fault::Refused);
    assert_holds(&[
        start(true, false),
        WAIT,
        unlabel,
        WAIT,
        refused,
        label,
        repeat,
    ]);
}

#[test]
fn a_claim_whose_finding_was_not_answered_is_released() {
    let before = Op::RanBefore {
        pod: 0,
        labelled: true,
    };
    let unlabel = Op::Label {
        pod: 0,
        labelled: false,
    };
    let lost = fault(Method::Find, Fault::AnswerLost);
    assert_holds(&[lost, before, WAIT, WAIT, Op::Wait { millis: 100 }, unlabel]);
}

#[test]
fn a_claim_that_cannot_be_released_keeps_no_add_waiting() {
    let before = Op::RanBefore {
        pod: 1,
        labelled: true,
    };
    let unlabel = Op::Label {
        pod: 1,
        labelled: false,
    };
    let lost = fault(Method::Find, Fault::AnswerLost);
    let mut ops = vec![lost, before, WAIT, WAIT, Op::Wait { millis: 100 }, unlabel];
    ops.extend([fault(Method::Release, Fault::Refused); 30]);
    let crash = Op::Crash {
        steps: 0,
        missed: 0,
    };
    let restart = Op::RestartBroker { down: 0 };
    ops.extend([crash, restart, WAIT, start(true, false), SETTLED]);
    let played = play(&ops, true);
    assert_eq!(played.reached.enrolled, 1, "{}", played.trace.join("\n"));
}

#[test]
fn what_cannot_be_forgotten_on_disk_is_not_tried_without_a_pause() {
    let read_only = Op::Disk {
        disk: Disk::ReadOnly,
    };
    let stop = Op::Stop {
        back: 0,
        deletes: true,
    };
    assert_holds(&[start(true, false), WAIT, read_only, stop, WAIT]);
}

#[test]
fn a_pod_that_drains_is_only_asked_for_its_connections() {
    let flows = Op::Flows { back: 0, flows: 1 };
    let unlabel = Op::Label {
        pod: 0,
        labelled: false,
    };
    let ops = [start(true, false), WAIT, flows, unlabel, SETTLED, SETTLED];
    assert_holds(&ops);
    assert_eq!(play(&ops, false).reached.inspections, 0);
}

#[test]
fn a_del_ends_an_add_that_waits_for_a_service_to_return() {
    let restart = Op::RestartBroker { down: 3000 };
    assert_holds(&[WAIT, restart, WAIT, start(true, false), WAIT, DELETE]);
}

#[test]
fn a_del_does_not_wait_while_ztunnel_is_sent_the_pod_again() {
    let silent = Op::Ztunnel {
        mode: Ztunnel::Silent,
    };
    let lost = Op::LoseListeners { back: 0 };
    // The interval of checks is random, and the wait for ztunnel is longer than the steps of this loop.
    for millis in (44_000..=84_000).step_by(8_000) {
        let checked = Op::Wait { millis };
        let add = start(true, false);
        assert_deletes_at_once(&[add, WAIT, lost, silent, checked, DELETE, SETTLED]);
    }
}

#[test]
fn a_wanted_pod_without_an_add_is_found_although_its_last_sandbox_has_ended() {
    let stop = Op::Stop {
        back: 0,
        deletes: false,
    };
    let label = Op::Label {
        pod: 0,
        labelled: true,
    };
    assert_holds(&[start(false, false), WAIT, stop, WAIT, label]);
}

#[test]
fn a_sandbox_that_a_restarted_broker_was_sent_while_it_ended_is_removed_there_too() {
    let late = fault(Method::Release, Fault::AnswerLate(1500));
    let stop = Op::Stop {
        back: 0,
        deletes: true,
    };
    let restart = Op::RestartBroker { down: 50 };
    assert_holds(&[start(true, false), WAIT, late, stop, restart]);
}

#[test]
fn the_deletion_of_a_replaced_sandbox_is_not_repeated_without_a_pause_while_the_broker_is_away() {
    let away = Op::RestartBroker { down: 3000 };
    let second = start(true, false);
    let delete = Op::Delete { back: 1 };
    assert_holds(&[start(true, false), WAIT, second, WAIT, away, delete, WAIT]);
}

#[test]
fn an_ending_sandbox_that_is_added_again_outside_the_mesh_keeps_no_rules() {
    let unlabel = Op::Label {
        pod: 0,
        labelled: false,
    };
    let repeat = Op::Repeat {
        back: 0,
        timeout: 5,
    };
    assert_holds(&[start(true, false), SETTLED, unlabel, DELETE, repeat]);
}

#[test]
fn a_sandbox_that_is_added_again_while_its_deletion_is_retried_keeps_no_rules() {
    let away = Op::RestartBroker { down: 3000 };
    let repeat = Op::Repeat {
        back: 0,
        timeout: 5,
    };
    let terminal = Op::Complete { pod: 0 };
    assert_holds(&[SETTLED, start(true, true), away, DELETE, repeat, terminal]);
}

const UNLABEL: Op = Op::Label {
    pod: 0,
    labelled: false,
};

const UNINSTALL: Op = Op::Leave {
    mode: Some(UninstallMode::Uninstall),
};

const MINUTE: Op = Op::Wait { millis: 65_000 };

fn set_patching(patching: Patching) -> Op {
    Op::Patching { patching }
}

/// Asserts the state of the last sandbox after the operations, before the faults end.
fn assert_state(ops: &[Op], state: &'static str) {
    let probe = Op::Flows { back: 0, flows: 0 };
    let played = play(&[ops, &[probe]].concat(), true);
    let met = played.reached.pairs.contains_key(&(state, "connections"));
    assert!(met, "{:?}\n{}", played.violation, played.trace.join("\n"));
}

#[test]
fn capture_ends_only_after_peers_see_that_the_pod_leaves() {
    let refused = set_patching(Patching::Refused);
    let ops = [
        Op::ApiServer,
        start(true, false),
        WAIT,
        refused,
        UNLABEL,
        MINUTE,
    ];
    assert_holds(&ops);
    assert_state(&ops, "announcing");
}

#[test]
fn an_annotation_whose_withdrawal_is_not_confirmed_counts_as_seen() {
    for fault in [Patching::AnswerLost, Patching::Hangs] {
        let start = start(true, false);
        let ops = [
            Op::ApiServer,
            start,
            WAIT,
            set_patching(fault),
            UNLABEL,
            WAIT,
        ];
        assert_holds(&ops);
    }
    let hangs = set_patching(Patching::Hangs);
    let ops = [
        Op::ApiServer,
        start(true, false),
        WAIT,
        hangs,
        UNLABEL,
        MINUTE,
    ];
    assert_state(&ops, "announcing");
}

#[test]
fn an_annotation_that_is_refused_for_good_blocks_no_uninstall() {
    let refused = set_patching(Patching::Refused);
    let start = start(true, false);
    let ops = [
        Op::ApiServer,
        start,
        WAIT,
        refused,
        UNINSTALL,
        MINUTE,
        MINUTE,
        SETTLED,
    ];
    assert_holds(&ops);
    assert_state(&ops, "out");
}

#[test]
fn an_uninstall_that_is_called_off_enrolls_the_pods_again() {
    let stays = Op::Leave { mode: None };
    let start = start(true, false);
    assert_holds(&[Op::ApiServer, start, WAIT, UNINSTALL, SETTLED, stays]);
}

#[test]
fn a_pod_with_a_sidecar_stays_redirected_to_it_while_it_runs_and_is_no_workload() {
    let inject = Op::Inject { pod: 0 };
    let start = start(false, false);
    let away = Op::RestartBroker { down: 3000 };
    let ops = [inject, away, start, WAIT, UNLABEL, MINUTE];
    assert_holds(&ops);
    assert_state(&ops, "enrolled");
    let left = [inject, start, WAIT, UNINSTALL, MINUTE];
    assert_holds(&left);
    assert_state(&left, "enrolled");
    assert_eq!(play(&left, false).reached.enrolled, 0);
}

#[test]
fn an_earlier_sandbox_whose_enrollment_was_undone_late_does_not_hold_up_an_uninstall() {
    let late = fault(Method::Release, Fault::AnswerLate(4000));
    assert_holds(&[late, start(false, false), start(true, true), UNINSTALL]);
}

#[test]
fn an_earlier_sandbox_with_a_sidecar_is_forgotten_when_it_has_ended_after_an_uninstall() {
    let inject = Op::Inject { pod: 0 };
    let next = start(false, true);
    assert_holds(&[inject, start(true, false), UNINSTALL, next]);
}

#[test]
fn a_broker_that_restarts_while_a_pod_is_withdrawn_keeps_no_workload() {
    let late = fault(Method::Release, Fault::Late(1500));
    let complete = Op::Complete { pod: 0 };
    let withdrawn = Op::Wait { millis: 6000 };
    let restart = Op::RestartBroker { down: 0 };
    let stop = Op::Stop {
        back: 0,
        deletes: true,
    };
    assert_holds(&[late, start(true, true), complete, withdrawn, restart, stop]);
}

#[test]
fn a_withdrawn_pod_whose_record_could_not_be_written_is_not_sent_to_a_restarted_broker() {
    let full = Op::Disk { disk: Disk::Full };
    let restart = Op::RestartBroker { down: 50 };
    assert_holds(&[start(true, true), WAIT, full, UNLABEL, MINUTE, restart]);
}

#[test]
fn a_pod_whose_sidecar_is_left_alone_by_an_uninstall_is_added_all_the_same() {
    let inject = Op::Inject { pod: 0 };
    let late = fault(Method::Claim, Fault::Late(100));
    assert_holds(&[late, inject, start(true, false), UNINSTALL]);
}

#[test]
fn a_cancelled_add_whose_claim_is_answered_soon_is_undone() {
    let late = fault(Method::Claim, Fault::AnswerLate(300));
    let wait = Op::Wait { millis: 100 };
    assert_holds(&[WAIT, late, start(true, false), wait, DELETE, WAIT]);
    let mut leaves = start(true, false);
    if let Op::Start { leaves_after, .. } = &mut leaves {
        *leaves_after = Some(100);
    }
    assert_holds(&[WAIT, late, leaves, WAIT]);
}

#[test]
fn rules_that_are_torn_before_their_application_is_answered_are_repaired() {
    let late = fault(Method::Apply, Fault::AnswerLate(1500));
    let tear = Op::Tear { back: 0 };
    assert_holds(&[WAIT, late, start(true, false), WAIT, tear, SETTLED]);
}

#[test]
fn a_pod_with_a_sidecar_that_ends_during_its_add_is_not_redirected_to_ztunnel() {
    let late = fault(Method::RemoveWorkload, Fault::Late(4000));
    let inject = Op::Inject { pod: 0 };
    let next = start(false, true);
    let complete = Op::Complete { pod: 0 };
    assert_holds(&[start(true, false), SETTLED, inject, late, next, complete]);
    let late = fault(Method::RemoveWorkload, Fault::Late(4000));
    assert_holds(&[start(true, false), SETTLED, inject, late, next, UNINSTALL]);
}

#[test]
fn a_check_during_which_its_netns_ends_may_report_what_was_before() {
    let late = fault(Method::ListWorkloads, Fault::Late(100));
    let unmount = Op::Unmount { back: 0 };
    let check = Op::Check { back: 0 };
    assert_holds(&[start(true, false), WAIT, late, unmount, check]);
}

#[test]
fn a_pod_with_a_sidecar_stays_redirected_also_after_a_wrong_del_and_an_uninstall() {
    let inject = Op::Inject { pod: 0 };
    assert_holds(&[inject, start(true, false), DELETE, UNINSTALL, MINUTE]);
}

#[test]
fn a_late_del_ends_nothing_before_the_source_has_shown_its_pods_to_a_restarted_pod_events() {
    let crash = Op::Crash {
        steps: 0,
        missed: 0,
    };
    let gap = Op::Gap { gap: true };
    let ops = [
        start(true, false),
        SETTLED,
        gap,
        DELETE,
        WAIT,
        crash,
        WAIT,
        MINUTE,
        SETTLED,
    ];
    assert_holds(&ops);
    assert_state(&ops, "deleting");
}

#[test]
fn an_enrollment_that_an_earlier_run_of_pod_events_began_is_not_undone_when_it_fails() {
    let label = Op::Label {
        pod: 0,
        labelled: true,
    };
    for steps in 0..4 {
        let crash = Op::Crash { steps, missed: 0 };
        let refused = fault(Method::Apply, Fault::Refused);
        let ops = [
            start(false, false),
            WAIT,
            refused,
            crash,
            label,
            WAIT,
            WAIT,
            SETTLED,
        ];
        assert_holds(&ops);
        let trace = play(&ops, true).trace.join("\n");
        let is_undone = trace.contains("RemoveRules");
        // Without a crash during the enrollment, pod-events undoes the failure.
        assert!(
            !trace.contains("pod-events crashes") || !is_undone,
            "{trace}"
        );
    }
}

#[test]
fn a_sidecars_sandbox_that_ends_after_an_uninstall_is_forgotten_with_the_pod_or_when_inpod_stays() {
    let inject = Op::Inject { pod: 0 };
    let stop = Op::Stop {
        back: 0,
        deletes: false,
    };
    let ended = [inject, start(true, true), WAIT, UNINSTALL, WAIT, stop, WAIT];
    assert_holds(&ended);
    let gone = Op::Show {
        pod: 0,
        shown: false,
    };
    let stays = Op::Leave { mode: None };
    let next = start(true, false);
    for ends in [gone, stays, DELETE, next] {
        let ops = [&ended[..], &[ends, SETTLED]].concat();
        assert_holds(&ops);
        let probe = Op::Flows {
            back: if ends == next { 1 } else { 0 },
            flows: 0,
        };
        let met = play(&[&ops[..], &[probe]].concat(), false).reached.pairs;
        assert!(met.contains_key(&("none", "connections")), "{ends:?}");
    }
}

#[test]
fn a_check_during_which_the_pods_next_sandbox_is_enrolled_may_report_what_was_before() {
    let late = fault(Method::ListWorkloads, Fault::Late(100));
    let check = Op::Check { back: 0 };
    let next = start(true, false);
    assert_holds(&[start(true, false), WAIT, late, check, next]);
}

#[test]
fn a_claim_for_a_deletion_that_a_crash_has_forgotten_is_released() {
    let read_only = Op::Disk {
        disk: Disk::ReadOnly,
    };
    let restart = Op::RestartNetconfig { down: 0 };
    for steps in 0..8 {
        let crash = Op::Crash { steps, missed: 0 };
        let outside = start(false, true);
        assert_holds(&[outside, WAIT, restart, read_only, DELETE, crash, SETTLED]);
    }
}

#[test]
fn torn_rules_of_an_interrupted_enrollment_are_not_looked_at_without_a_pause() {
    let recreate = Op::Recreate {
        pod: 0,
        labelled: false,
    };
    let tear = Op::Tear { back: 0 };
    let restart = Op::RestartNetconfig { down: 50 };
    for steps in 6..14 {
        let crash = Op::Crash { steps, missed: 0 };
        assert_holds(&[start(true, true), restart, crash, WAIT, recreate, tear]);
    }
}

#[test]
fn an_add_of_a_sandbox_that_was_found_by_its_processes_is_answered_only_when_it_is_enrolled() {
    let refuses = Op::Ztunnel {
        mode: Ztunnel::Refuses,
    };
    let label = Op::Label {
        pod: 0,
        labelled: true,
    };
    let repeat = Op::Repeat {
        back: 0,
        timeout: 5,
    };
    let outside = start(false, true);
    let found = [
        outside, WAIT, DELETE, WAIT, refuses, label, WAIT, WAIT, WAIT,
    ];
    assert_holds(&[&found[..], &[repeat]].concat());
    let answers = Op::Ztunnel {
        mode: Ztunnel::Answers,
    };
    let ops = [&found[..], &[answers, repeat, WAIT]].concat();
    assert_eq!(play(&ops, false).reached.enrolled, 1);
}

#[test]
fn an_add_that_is_repeated_after_an_uninstall_was_called_off_is_answered_with_the_sidecar() {
    let inject = Op::Inject { pod: 0 };
    let stays = Op::Leave { mode: None };
    let repeat = Op::Repeat {
        back: 0,
        timeout: 5,
    };
    for after in [&[repeat][..], &[stays, repeat]] {
        let ops = [&[inject, start(true, true), WAIT, UNINSTALL, WAIT], after].concat();
        assert_holds(&ops);
        let trace = play(&ops, true).trace.join("\n");
        assert!(!trace.contains("still runs in the netns"), "{trace}");
    }
}

#[test]
fn a_del_with_which_the_source_agrees_ends_a_sandbox_although_its_pod_is_shown_again() {
    let show = |shown| Op::Show { pod: 0, shown };
    let deleted = [start(true, true), DELETE, show(false), WAIT, WAIT];
    assert_holds(&[&deleted[..], &[show(true), SETTLED]].concat());
    assert_holds(&[&deleted[..], &[UNINSTALL, show(true), SETTLED]].concat());
}

#[test]
fn a_pod_that_ran_before_inpod_gets_no_rules_while_it_leaves() {
    let silent = Op::Ztunnel {
        mode: Ztunnel::Silent,
    };
    let before = Op::RanBefore {
        pod: 0,
        labelled: true,
    };
    // pod-events crashes before the search for pods to adopt.
    let crash = Op::Crash {
        steps: 0,
        missed: 2,
    };
    let restart = Op::RestartNetconfig { down: 0 };
    let ops = [crash, silent, before, WAIT, UNLABEL, WAIT, restart, WAIT];
    assert_holds(&ops);
    assert_state(&ops, "leaving");
}

#[test]
fn drift_that_is_reported_while_a_pod_is_enrolled_again_does_not_interrupt_it() {
    let ztunnel = |mode| Op::Ztunnel { mode };
    let (silent, answers) = (ztunnel(Ztunnel::Silent), ztunnel(Ztunnel::Answers));
    let tear = Op::Tear { back: 0 };
    let wrong = [
        start(true, false),
        SETTLED,
        DELETE,
        silent,
        Op::RestartZtunnel,
        MINUTE,
    ];
    let ops = [&wrong[..], &[tear, WAIT, answers, SETTLED]].concat();
    assert_holds(&ops);
    let trace = play(&ops, true).trace.join("\n");
    // The workload is added by the ADD, and again after the DEL is rejected.
    assert_eq!(trace.matches("  AddWorkload net/c0").count(), 2, "{trace}");
}

#[test]
fn a_running_pod_with_a_sidecar_keeps_rules_whose_application_is_not_answered() {
    let inject = Op::Inject { pod: 0 };
    let hangs = fault(Method::Apply, Fault::AnswerHangs);
    let crash = Op::Crash {
        steps: 0,
        missed: 3,
    };
    assert_holds(&[crash, hangs, inject, start(false, true), MINUTE]);
}
