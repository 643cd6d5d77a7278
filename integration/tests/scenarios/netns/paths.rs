//! Only the pod's own netns is ever changed, wherever `CNI_NETNS` leads.

use std::{
    fs,
    os::unix::{fs::symlink, net::UnixListener},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use integration::{Call, Node, Pod, Spec, State, TIMEOUT};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::Mode,
    unistd::mkfifo,
};

/// Files below `/run/netns`, removed on drop.
#[derive(Default)]
struct Made(Vec<PathBuf>);

impl Made {
    /// Returns a name below `/run/netns` that no other test uses.
    fn name(&mut self, node: &Node, what: &str) -> PathBuf {
        let path = PathBuf::from(format!("/run/netns/{}-{what}", node.name()));
        self.0.push(path.clone());
        path
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            while umount2(path, MntFlags::MNT_DETACH).is_ok() {}
            if fs::remove_file(path).is_err() {
                fs::remove_dir(path).unwrap_or_default();
            }
        }
    }
}

fn bind(from: &Path, to: &Path) {
    if !to.exists() {
        fs::write(to, "").unwrap();
    }
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    // A mount over it would propagate to the other.
    mount(
        None::<&str>,
        to,
        None::<&str>,
        MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .unwrap();
}

/// Expects this code and reason, not those of a deadline: nothing at the path may block.
fn refused(node: &Node, pod: &Pod, path: &Path, code: u64, named: &str) {
    let call = node.call(Call::add, pod).timeout_seconds(8);
    let outcome = call
        .with_var("CNI_NETNS", &path.display().to_string())
        .run()
        .unwrap();
    let (found, words) = outcome.refusal().unwrap();
    assert!(
        found == code && words.contains(named),
        "{}: {found} {words}, not {code} {named}",
        path.display()
    );
}

/// A pod in the mesh, and a sandbox for the calls. Afterwards all is as it was.
fn everywhere_refused(
    table: impl FnOnce(&Node, &Pod, &Pod, &mut Made) -> Vec<(PathBuf, u64, &'static str)>,
) {
    let node = Node::running().unwrap();
    let victim = node.pod(Spec::new("victim").ambient()).unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let before = State::of(&node, &[&victim, &pod]).unwrap();
    let mut made = Made::default();
    for (path, code, named) in table(&node, &victim, &pod, &mut made) {
        refused(&node, &pod, &path, code, named);
    }
    // Even if the result lacks addresses, another pod's netns with some belongs to another sandbox.
    let call = node.call(Call::add, &pod).without_key("prevResult");
    let call = call.with_var("CNI_NETNS", &victim.path().display().to_string());
    let (code, words) = call.run().unwrap().refusal().unwrap();
    assert!(
        code == 100 && words.contains("NETNS_IN_USE"),
        "{code} {words}"
    );
    before.unchanged(&node, &[&victim, &pod]).unwrap();
    node.add(&pod).unwrap();
    node.until_whole(&victim.spec).unwrap();
}

#[test]
fn a_path_at_which_no_netns_is_is_refused_and_never_waited_for() {
    everywhere_refused(|node, _, pod, made| {
        let mut make = |what: &str| made.name(node, what);
        let fifo = make("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let file = make("file");
        fs::write(&file, "").unwrap();
        let directory = make("directory");
        fs::create_dir(&directory).unwrap();
        let socket = make("socket");
        drop(UnixListener::bind(&socket).unwrap());
        let loop_ = make("loop");
        symlink(&loop_, &loop_).unwrap();
        // A namespace of another type.
        let uts = make("uts");
        bind(Path::new("/proc/self/ns/uts"), &uts);
        let gone = make("gone");
        bind(pod.path(), &gone);
        umount2(&gone, MntFlags::MNT_DETACH).unwrap();
        let name = pod.path().file_name().unwrap().display().to_string();
        let no_netns = "NETNS_NOT_A_NETNS";
        let at = |path: String, code| (path.into(), code, "CNI_NETNS");
        vec![
            (fifo, 100, no_netns),
            (file, 100, no_netns),
            (directory, 100, no_netns),
            (socket, 100, no_netns),
            (gone, 100, no_netns),
            (uts, 100, no_netns),
            (loop_, 5, "CNI_NETNS"),
            at(format!("/run/netns/{name}-nobody"), 4),
            at(format!("/run/netns/{name}/a"), 5),
            at(format!("/run/netns/{}", "x".repeat(300)), 5),
            at(format!("/run/{}", "x/".repeat(2100)), 4),
        ]
    });
}

#[test]
fn a_path_that_leads_elsewhere_or_from_elsewhere_is_refused() {
    everywhere_refused(|node, _, pod, made| {
        let link = made.name(node, "link");
        symlink(pod.path(), &link).unwrap();
        let outside = node.run_dir().with_file_name("outside");
        bind(pod.path(), &outside);
        made.0.push(outside.clone());
        let name = pod.path().file_name().unwrap().display().to_string();
        let own = pod.path().display();
        let mut paths = vec![link, outside];
        paths.extend([
            format!("/run/netns/../netns/{name}").into(),
            format!("/proc/self/root{own}").into(),
            format!("/proc/1/root{own}").into(),
        ]);
        let plain = [
            "/dev/null",
            "/dev/tty",
            "/",
            "/run/netns",
            "/run/netns/..",
            "/proc/self/ns/mnt",
            "/proc/self/cwd",
        ];
        paths.extend(plain.map(PathBuf::from));
        paths
            .into_iter()
            .map(|path| (path, 100, "NETNS_PATH_REFUSED"))
            .collect()
    });
}

// scenario: 35
#[test]
fn the_hosts_netns_and_that_of_another_pod_are_refused() {
    everywhere_refused(|node, victim, _, made| {
        let host = made.name(node, "host");
        bind(Path::new("/proc/1/ns/net"), &host);
        let services = made.name(node, "services");
        bind(node.netns().path(), &services);
        let other = made.name(node, "other");
        bind(victim.path(), &other);
        let is_host = "NETNS_IS_HOST";
        vec![
            ("/proc/1/ns/net".into(), 100, is_host),
            (host, 100, is_host),
            (services, 100, is_host),
            (node.netns().path().into(), 100, is_host),
            (victim.path().into(), 100, "ADDRESS_MISMATCH"),
            (other, 100, "ADDRESS_MISMATCH"),
        ]
    });
}

#[test]
fn a_path_that_is_swapped_while_calls_run_never_changes_another_netns() {
    let node = Node::running().unwrap();
    let mut made = Made::default();
    let path = made.name(&node, "swapped");
    // The probe set exists from the first pod on.
    let _first = node.pod(Spec::new("first").ambient()).unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    // The most plausible target: with addresses, unclaimed.
    let other = node.sandbox(Spec::new("other")).unwrap();
    let before = State::of(&node, &[&other]).unwrap();
    bind(other.path(), &path);
    let done = AtomicBool::new(false);
    let (joined, refused) = thread::scope(|scope| {
        let swapping = scope.spawn(|| {
            let mut swaps = 0;
            let end = Instant::now() + 3 * TIMEOUT;
            while !done.load(Ordering::Relaxed) && Instant::now() < end {
                // Each eighth time a whole call may fit in, on a busy machine, too.
                let is_long = swaps % 8 == 7;
                let hold = |micros| if is_long { 50_000 } else { micros };
                bind(pod.path(), &path);
                thread::sleep(Duration::from_micros(hold(700)));
                umount2(&path, MntFlags::MNT_DETACH).unwrap();
                thread::sleep(Duration::from_micros(hold(300)));
                swaps += 1;
            }
            swaps
        });
        let call = node
            .call(Call::add, &pod)
            .with_var("CNI_NETNS", &path.display().to_string());
        let (mut joined, mut refused) = (0, 0);
        while joined + refused < 60 || ((joined == 0 || refused == 0) && joined + refused < 600) {
            let outcome = call.run().unwrap();
            if outcome.code == 0 {
                joined += 1;
                assert_eq!(node.call(Call::del, &pod).run().unwrap().code, 0);
            } else {
                let (_, words) = outcome.refusal().unwrap();
                assert!(
                    words.contains("NETNS_MISMATCH") || words.contains("ADDRESS_MISMATCH"),
                    "{words}"
                );
                refused += 1;
            }
            assert_eq!(other.traces().unwrap(), Vec::<String>::new());
        }
        done.store(true, Ordering::Relaxed);
        assert!(swapping.join().unwrap() > 60);
        (joined, refused)
    });
    assert!(
        joined > 0 && refused > 0,
        "{joined} joined, {refused} refused: there was no race"
    );
    before.unchanged(&node, &[&other]).unwrap();
}

#[test]
fn an_add_without_a_netns_is_refused_and_a_del_without_one_is_not() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let before = State::of(&node, &[&pod]).unwrap();
    let add = node.call(Call::add, &pod).with_var("CNI_NETNS", "");
    let (code, words) = add.run().unwrap().refusal().unwrap();
    assert!(
        code == 4 && words.contains("CNI_NETNS: missing"),
        "{code} {words}"
    );
    let del = node.call(Call::del_again, &pod).run().unwrap();
    assert_eq!((del.code, del.stdout.as_str()), (0, ""));
    before.unchanged(&node, &[&pod]).unwrap();
}
