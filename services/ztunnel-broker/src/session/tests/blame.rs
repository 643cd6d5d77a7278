//! Sessions that ended while a message was unanswered.

use super::*;

fn reconnect(script: &mut Script, cause: &str) {
    if let Some((uid, during)) = script.session.suspect() {
        let uid = uid.clone();
        script
            .inputs
            .quarantine
            .record_loss(&uid, &WHO, during, cause, script.now);
    }
    script.session = session(script.now);
    script.session.on_hello(&script.inputs, script.now);
}

#[test]
fn the_pod_in_flight_when_a_session_ended_is_kept_in_the_next_and_added_last() {
    let all = ["p1", "p2", "p3"].map(|pod| workload(pod, pod, 1, 1));
    let mut script = Script::greeted(all.to_vec());
    assert_eq!(script.next(), "add p1 as p1 in 1");
    reconnect(&mut script, "it closed the connection");
    script.expect(&[
        "add p2 as p2 in 1",
        "add p3 as p3 in 1",
        "keep p1",
        "snapshot sent",
        "add p1 as p1 in 1",
    ]);
}

#[test]
fn a_pod_over_whose_keep_two_sessions_ended_is_left_out_of_the_next_snapshot() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 0, 1), workload("c2", "p2", 2, 1)]);
    for _ in 0..2 {
        assert_eq!(script.next(), "add p2 as p2 in 2");
        script.ack();
        assert_eq!(script.next(), "keep p1");
        reconnect(&mut script, "it closed the connection");
    }
    script.expect(&["add p2 as p2 in 2", "snapshot sent"]);
}

#[test]
fn another_ztunnel_adds_at_once_what_the_first_one_lost_its_sessions_over() {
    let mut script = Script::live(vec![]);
    let suspect = uid("p");
    for _ in 0..5 {
        script.inputs.quarantine.record_loss(
            &suspect,
            &WHO,
            LostDuring::Add,
            "it closed the connection",
            script.now,
        );
    }
    script.put(workload("c", "p", 1, 2));
    script.expect(&[]);
    script.session = Session::new(Peer::from_pid(2), TIMEOUT, script.now);
    script.session.on_hello(&script.inputs, script.now);
    script.expect(&["keep p", "snapshot sent", "add p as p in 1"]);
}

#[test]
fn a_suspected_pod_is_added_after_all_others() {
    let mut script = Script::live(vec![]);
    let (suspect, cause) = (uid("p"), "it closed the connection");
    let quarantine = &mut script.inputs.quarantine;
    quarantine.record_loss(&suspect, &WHO, LostDuring::Add, cause, script.now);
    let all = vec![workload("c1", "p", 1, 1), workload("c2", "q", 2, 2)];
    script.set(2, all);
    script.fetch();
    script.expect(&["add q as q in 2", "add p as p in 1"]);
}

#[test]
fn no_pod_is_suspected_for_a_message_that_was_not_sent() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    assert_eq!(script.next(), "add p as p in 1");
    script.session.on_send_failed();
    assert_eq!(script.session.suspect(), None);
}

#[test]
fn errors_after_which_stock_ztunnel_hangs_up_end_the_session_and_raise_suspicion() {
    for error in [
        "failure to read message : truncated",
        "failure to process message : ProtocolError",
    ] {
        let mut script = Script::live(vec![]);
        script.put(workload("c", "p", 1, 2));
        assert_eq!(script.next(), "add p as p in 1");
        let end = script
            .session
            .on_ack(Nack::parse(error), &script.inputs, script.now);
        assert!(
            matches!(
                end,
                Err(SessionEnd::Refused {
                    verb: "add a pod",
                    ..
                })
            ),
            "{end:?}"
        );
        let blamed = script.session.suspect();
        assert_eq!(blamed, Some((&uid("p"), LostDuring::Add)), "{error}");
    }
}

#[test]
fn no_pod_is_suspected_for_the_end_of_a_session_without_a_pod_in_flight() {
    let mut script = Script::live(vec![workload("c", "p", 1, 1)]);
    assert_eq!(script.session.suspect(), None);
    script.remove("c", 2);
    assert_eq!(script.next(), "del p");
    assert_eq!(script.session.suspect(), None);
}

/// The model test found this case: the pod was neither kept, because the suspicion had ended, nor added before the end.
#[test]
fn a_suspect_that_another_ztunnel_takes_meanwhile_is_added_in_what_is_left_of_the_snapshot() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 1, 1), workload("c2", "p2", 2, 1)]);
    assert_eq!(script.next(), "add p1 as p1 in 1");
    reconnect(&mut script, "it closed the connection");
    assert_eq!(script.next(), "add p2 as p2 in 2");
    script.inputs.quarantine.clear(&uid("p1"));
    script
        .session
        .on_change(&uid("p1"), &script.inputs, script.now);
    script.ack();
    script.expect(&["add p1 as p1 in 1", "snapshot sent"]);
}
