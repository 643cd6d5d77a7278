//! The plugin's socket or state directory is unusable. The error names it before the deadline; no pod is admitted
//! unenrolled and no DEL fails.

use std::{
    fs,
    os::{
        fd::AsRawFd as _,
        unix::{fs::symlink, net::UnixListener},
    },
};

use integration::{Call, Node, Pod, Spec, TIMEOUT, run};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        signal::Signal,
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket},
        stat::Mode,
    },
    unistd::mkfifo,
};

#[test]
fn an_agent_socket_that_is_none_is_reported_by_its_path_and_never_waited_for() {
    let node = Node::new().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let place = node.run_dir().with_file_name("odd");
    fs::create_dir(&place).unwrap();
    let at = |name: &str| place.join(name);
    fs::create_dir(at("directory")).unwrap();
    fs::write(at("file"), "").unwrap();
    mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
    symlink(at("loop"), at("loop")).unwrap();
    drop(UnixListener::bind(at("stale")).unwrap());
    // Of another type, as the ZDS socket is.
    let other = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::empty(),
        None,
    )
    .unwrap();
    bind(other.as_raw_fd(), &UnixAddr::new(&at("packets")).unwrap()).unwrap();
    for name in [
        "directory",
        "file",
        "fifo",
        "loop",
        "stale",
        "packets",
        "nothing",
    ] {
        let path = at(name).display().to_string();
        let call = node
            .call(Call::add, &pod)
            .with_key("agentSocket", path.as_str());
        let outcome = call.run().unwrap();
        let (code, words) = outcome.refusal().unwrap();
        assert!(
            code == 11 && words.contains(&path),
            "{name}: {code} {words}"
        );
        assert!(outcome.took < TIMEOUT, "{name}: {:?}", outcome.took);
    }
    assert!(pod.traces().unwrap().is_empty());
}

#[test]
fn where_a_spool_cannot_be_written_no_pod_is_admitted_unenrolled_and_no_del_fails() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let other = Spec {
        namespace: "bank".to_owned(),
        ..Spec::new("b")
    };
    let other = node.sandbox(other).unwrap();
    node.stop("pod-events", Signal::SIGKILL).unwrap();
    let state = node.state_dir();
    let none = None::<&str>;
    // A page for a directory, one for a list: no entry fits.
    mount(
        none,
        &state,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("size=4k,mode=0700"),
    )
    .unwrap();
    fs::write(state.join("enrolled-namespaces"), "shop\n".repeat(819)).unwrap();
    let full = refused_and_ended(&node, &pod, &other);
    assert!(full.contains("No space left"), "{full}");
    mount(
        none,
        &state,
        none,
        MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
        none,
    )
    .unwrap();
    let read_only = refused_and_ended(&node, &pod, &other);
    assert!(read_only.contains("Read-only"), "{read_only}");
    umount2(&state, MntFlags::MNT_DETACH).unwrap();
    run(
        "sh",
        &["-c", &format!("rm -rf {0} && echo > {0}", state.display())],
    )
    .unwrap();
    let no_directory = refused_and_ended(&node, &pod, &other);
    assert!(
        no_directory.contains("Not a directory") || no_directory.contains("File exists"),
        "{no_directory}"
    );
}

/// An ADD that must be recorded waits; a DEL succeeds and reports its fate. Returns the ADD's message.
fn refused_and_ended(node: &Node, pod: &Pod, other: &Pod) -> String {
    let (code, words) = node
        .call(Call::add, other)
        .run()
        .unwrap()
        .refusal()
        .unwrap();
    assert_eq!(code, 11, "{words}");
    assert!(
        words.contains(&node.state_dir().display().to_string()) || words.contains("cannot be read"),
        "{words}"
    );
    let outcome = node.call(Call::del, pod).run().unwrap();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, ""));
    assert!(
        outcome.stderr.contains("\"ERROR\"")
            && outcome
                .stderr
                .contains("Could not report or spool the deletion"),
        "{}",
        outcome.stderr
    );
    words
}
