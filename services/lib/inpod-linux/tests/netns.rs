//! Opens, enters and leaves network namespaces, which needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, symlink},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    thread,
};

use inpod_linux::{Netns, OpenError};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
    unistd::mkfifo,
};
use tempfile::TempDir;

const HOME: &str = "/proc/thread-self/ns/net";

/// A temporary directory, the only root.
struct Root(TempDir);

impl Root {
    fn new() -> Self {
        demand_root();
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn open(&self, path: &Path) -> Result<Netns, OpenError> {
        Netns::open(path, &[self.0.path().to_owned()])
    }
}

fn demand_root() {
    let root = nix::unistd::geteuid().is_root();
    assert!(
        root,
        "these tests enter network namespaces: run them as root"
    );
}

/// Runs `f` with mounts of its own and new namespaces of `flags`.
fn apart<T: Send>(flags: CloneFlags, f: impl FnOnce() -> T + Send) -> T {
    demand_root();
    thread::scope(|scope| {
        let apart = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS | flags).unwrap();
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
            f()
        });
        apart.join().unwrap()
    })
}

/// Bind-mounts like `ip netns add` and container runtimes.
fn bind(namespace: &str, path: &Path) {
    fs::write(path, "").unwrap();
    mount(
        Some(namespace),
        path,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
}

fn inode_here() -> io::Result<u64> {
    Ok(fs::metadata(HOME)?.ino())
}

#[test]
fn a_mounted_netns_is_opened_proven_entered_and_left() {
    let root = Root::new();
    apart(CloneFlags::CLONE_NEWNET, || {
        let path = root.path("pod");
        bind(HOME, &path);
        let netns = root.open(&path).unwrap();
        assert_eq!(netns.id().inode, inode_here().unwrap());
        assert_ne!(netns.id().cookie, 0);
        assert!(netns.path_intact() && netns.same_as(&Netns::current().unwrap()));
        thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                let home = inode_here().unwrap();
                let inside = netns.within(inode_here).unwrap().unwrap();
                assert_eq!(inside, netns.id().inode);
                assert_eq!(inode_here().unwrap(), home);
            });
            elsewhere.join().unwrap();
        });
    });
}

#[test]
fn a_panic_inside_comes_home_first() {
    let home = inode_here().unwrap();
    let netns = apart(CloneFlags::CLONE_NEWNET, || Netns::current().unwrap());
    let inside = AssertUnwindSafe(|| netns.within(|| panic!("on purpose")).unwrap());
    assert!(catch_unwind(inside).is_err());
    assert_eq!(inode_here().unwrap(), home);
}

#[test]
fn two_netns_have_different_cookies_and_one_has_the_same_twice() {
    let netns = || apart(CloneFlags::CLONE_NEWNET, || Netns::current().unwrap());
    let (a, b) = (netns(), netns());
    assert_ne!(a.id().cookie, b.id().cookie);
    let again = a.within(|| Netns::current().unwrap()).unwrap();
    assert!(a.same_as(&again) && !a.same_as(&b));
}

#[test]
fn a_namespace_of_another_type_is_told_apart() {
    let root = Root::new();
    apart(CloneFlags::empty(), || {
        let path = root.path("uts");
        bind("/proc/self/ns/uts", &path);
        assert!(matches!(root.open(&path), Err(OpenError::NotNet(_))));
    });
}

#[test]
fn a_fifo_a_device_a_file_and_a_directory_are_no_namespaces() {
    let root = Root::new();
    mkfifo(&root.path("fifo"), Mode::S_IRUSR).unwrap();
    fs::write(root.path("file"), "").unwrap();
    fs::create_dir(root.path("directory")).unwrap();
    for name in ["fifo", "file", "directory"] {
        let result = root.open(&root.path(name));
        assert!(
            matches!(result, Err(OpenError::NotANamespace(_))),
            "{name}: {result:?}"
        );
    }
    let result = Netns::open(Path::new("/dev/zero"), &["/dev".into()]);
    assert!(
        matches!(result, Err(OpenError::NotANamespace(_))),
        "{result:?}"
    );
}

#[test]
fn a_link_as_last_component_is_not_followed() {
    let root = Root::new();
    symlink("/proc/self/ns/net", root.path("link")).unwrap();
    let result = root.open(&root.path("link"));
    assert!(matches!(result, Err(OpenError::Symlink(_))), "{result:?}");
    let result = Netns::open(Path::new("/proc/self/ns/mnt"), &["/proc".into()]);
    assert!(matches!(result, Err(OpenError::Symlink(_))), "{result:?}");
}

#[test]
fn procfs_leads_to_a_netns_by_ns_net_alone() {
    let roots = ["/proc".into()];
    let here = Netns::open(Path::new("/proc/self/ns/net"), &roots).unwrap();
    assert_eq!(here.id().inode, inode_here().unwrap());
    let fd = fs::File::open(HOME).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let result = Netns::open(Path::new(&path), &roots);
    assert!(matches!(result, Err(OpenError::Symlink(_))), "{result:?}");
}

#[test]
fn a_path_through_another_processs_root_is_refused() {
    let result = Netns::open(
        Path::new("/proc/self/root/proc/self/ns/net"),
        &["/proc".into()],
    );
    assert!(matches!(result, Err(OpenError::Symlink(_))), "{result:?}");
}

#[test]
fn a_directory_link_is_followed_and_judged_by_where_it_leads() {
    let root = Root::new();
    symlink("/proc/self/ns", root.path("out")).unwrap();
    let path = root.path("out").join("net");
    assert!(matches!(
        root.open(&path),
        Err(OpenError::OutsideRoots { .. })
    ));
    apart(CloneFlags::CLONE_NEWNET, || {
        fs::create_dir(root.path("real")).unwrap();
        symlink("real", root.path("linked")).unwrap();
        bind(HOME, &root.path("real/pod"));
        root.open(&root.path("linked/pod")).unwrap();
    });
}

#[test]
fn a_path_that_is_relative_climbs_or_lies_outside_is_refused() {
    let root = Root::new();
    for path in ["proc/self/ns/net", "/proc/self/../self/ns/net", "/"] {
        let result = Netns::open(Path::new(path), &["/proc".into()]);
        assert!(
            matches!(result, Err(OpenError::NotPlain(_))),
            "{path}: {result:?}"
        );
    }
    let result = root.open(Path::new("/proc/self/ns/net"));
    assert!(
        matches!(result, Err(OpenError::OutsideRoots { .. })),
        "{result:?}"
    );
}

#[test]
fn nothing_at_the_path_is_missing_whatever_is_missing_of_it() {
    let root = Root::new();
    for name in ["gone", "gone/too"] {
        let result = root.open(&root.path(name));
        assert!(
            matches!(result, Err(OpenError::Missing(_))),
            "{name}: {result:?}"
        );
    }
}

#[test]
fn a_path_that_was_taken_away_or_reused_is_not_intact() {
    let root = Root::new();
    apart(CloneFlags::CLONE_NEWNET, || {
        let path = root.path("pod");
        bind(HOME, &path);
        let netns = root.open(&path).unwrap();
        umount2(&path, MntFlags::MNT_DETACH).unwrap();
        assert!(!netns.path_intact());
        fs::remove_file(&path).unwrap();
        assert!(!netns.path_intact());
    });
}

#[test]
fn a_new_netns_is_another_one_and_lives_while_it_is_held() {
    let (one, other) = (Netns::create().unwrap(), Netns::create().unwrap());
    assert!(!one.same_as(&other));
    assert!(!one.same_as(&Netns::current().unwrap()));
    let interfaces = one.within(|| fs::read_to_string("/proc/thread-self/net/dev"));
    let interfaces = interfaces.unwrap().unwrap();
    assert!(
        interfaces.contains("lo:") && !interfaces.contains("eth"),
        "{interfaces}"
    );
}
