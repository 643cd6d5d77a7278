//! A pod with `hostUsers: false`: users and groups are those of its user namespace.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use netconfig::{inspect, rules::Redirection};
use nix::sched::{CloneFlags, setns};

use super::{
    checks::checks,
    mesh::{EVERYWHERE, Mesh, PROXY},
    process::Role,
    settings,
};
use crate::packets::{
    matrix::run_all,
    probe::Dial,
    world::{Place, Pod, outside},
};
use crate::support::Fresh;

/// Such pods' first ID and number of IDs, as with the kubelet.
const FIRST: u32 = 1_000_000;
const COUNT: u32 = 65_536;

/// Has its own user namespace and netns.
struct Holder(Child);

impl Holder {
    fn start() -> Self {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--net", "sh", "-c", "echo here && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        assert_eq!(line, "here\n", "unshare --user does not work here");
        for map in ["uid_map", "gid_map"] {
            let path = format!("/proc/{}/{map}", child.id());
            fs::write(path, format!("0 {FIRST} {COUNT}")).unwrap();
        }
        Self(child)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the thread is to stay in it, which nothing but a test may want"
    )]
    fn enter(&self) -> Fresh {
        let path = format!("/proc/{}/ns/net", self.0.id());
        let fresh = Fresh::by(move || {
            let netns = fs::File::open(path).unwrap();
            setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
        });
        fresh.ip("link set lo up");
        fresh
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn mesh(holder: &Holder) -> Mesh {
    let users = Some((holder.0.id(), FIRST));
    Mesh::within(Pod::Dual, holder.enter(), users, (PROXY, Role::Answers))
}

#[test]
fn in_a_netns_of_another_user_namespace_its_own_users_are_meant() {
    let holder = Holder::start();
    let mesh = mesh(&holder);
    let world = &mesh.world;
    for settings in [settings::names(), settings::rich()] {
        let redirection = Redirection::Sidecar(settings.clone());
        let applied = world.redirect(&redirection);
        assert!(applied.changed);
        let checks = checks(&settings, world.families());
        assert_eq!(run_all(world, &checks), [""; 0]);
        let verified = world.writer.verify(&world.pod.netns, &redirection);
        assert_eq!(verified.unwrap().differences, [""; 0]);
        assert!(!world.redirect(&redirection).changed);
    }
}

#[test]
fn in_a_netns_of_another_user_namespace_its_own_proxys_connections_are_not_direct() {
    let holder = Holder::start();
    let mesh = mesh(&holder);
    let world = &mesh.world;
    mesh.apply(&settings::basic());
    let mut held = Vec::new();
    for family in world.families() {
        let out = Dial::tcp(Place::Pod, outside(*family), EVERYWHERE).of(PROXY);
        held.push(out.hold(world).0.unwrap());
    }
    let proxies = world.writer.observe(&world.pod.netns).unwrap().proxies;
    assert_eq!(proxies, inspect::Proxies::of([FIRST + PROXY.user]));
    let direct = |proxies| inspect::direct_flows(&world.pod.netns, proxies).unwrap();
    assert_eq!(direct(&proxies), 0);
    assert_eq!(direct(&inspect::Proxies::of([PROXY.user])), 2);
}

/// Negative control: the host's IDs match no socket there.
#[test]
fn the_machines_numbers_of_those_users_are_not_meant() {
    let holder = Holder::start();
    let mesh = mesh(&holder);
    let owner = |number: u32| netconfig::rules::Owner::new(FIRST + number).unwrap();
    let settings = netconfig::rules::Sidecar {
        proxy_users: vec![owner(PROXY.user)],
        proxy_groups: vec![owner(PROXY.group)],
        ..settings::basic()
    };
    mesh.apply(&settings);
    let checks = checks(&settings::basic(), mesh.world.families());
    let failed = run_all(&mesh.world, &checks);
    let of_proxy = "TCP of user 1337 and group 1000 to 10.9.0.2:8080 goes out";
    assert!(
        failed
            .iter()
            .any(|failure| failure.to_lowercase().contains(&of_proxy.to_lowercase())),
        "{failed:#?}"
    );
}
