use std::{
    net::TcpListener,
    os::fd::OwnedFd,
    process::{Child, Command},
};

use netconfig::conflicts::{Kind, find_conflicts};

use super::{Fresh, capture, listen};

/// Hands a listener to a process in the netns of the pod.
fn hold(pod: &Fresh, listener: TcpListener) -> Child {
    pod.run(move || {
        let held = OwnedFd::from(listener);
        let mut sleep = Command::new("sleep");
        sleep.arg("60").stdin(held).spawn().unwrap()
    })
}

fn found(pod: &Fresh) -> Vec<(Kind, String)> {
    let findings = find_conflicts(&pod.netns, &[]).unwrap().into_iter();
    findings.map(|it| (it.kind, it.sentence)).collect()
}

#[test]
fn a_port_of_ztunnel_is_missing_without_a_listener() {
    let pod = Fresh::new();
    assert_eq!(found(&pod), []);
    capture(&pod);
    let missing = |port| {
        let sentence = format!("ztunnel does not listen on TCP port {port}.");
        (Kind::ListenerMissing, sentence)
    };
    assert_eq!(found(&pod), [15001, 15006, 15008].map(missing));
    let mut ztunnel = [15001, 15006, 15008].map(|port| Some(listen(&pod, port)));
    assert_eq!(found(&pod), []);
    ztunnel[1].take();
    assert_eq!(found(&pod), [missing(15006)]);
}

#[test]
fn a_port_of_ztunnel_is_taken_by_what_lacks_the_mark_or_is_the_pods() {
    let pod = Fresh::new();
    capture(&pod);
    let _ztunnel = [15001, 15008].map(|port| listen(&pod, port));
    let unmarked = pod.run(|| TcpListener::bind("0.0.0.0:15006").unwrap());
    let unknown = "TCP port 15006 is held by a socket of uid 0 without ztunnel's mark.";
    assert_eq!(found(&pod), [(Kind::ListenerTaken, unknown.to_owned())]);
    drop(unmarked);
    let mut thief = hold(&pod, listen(&pod, 15006));
    let pid = thief.id();
    let known = format!("TCP port 15006 is held by sleep (pid {pid}, uid 0) instead of ztunnel.");
    assert_eq!(found(&pod), [(Kind::ListenerTaken, known)]);
    thief.kill().unwrap();
    thief.wait().unwrap();
    let _last = listen(&pod, 15006);
    assert_eq!(found(&pod), []);
}
