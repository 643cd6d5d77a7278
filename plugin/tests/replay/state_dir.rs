//! Calls while an attacker with the rights of `pod-events` has replaced files of `stateDir`.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use inpod_cni::enrolled::{DISABLED_FILE, ENROLLED_FILE};
use nix::{sys::stat::Mode, unistd::mkfifo};
use tempfile::TempDir;

use crate::{
    node::{Node, TIMEOUT},
    recorded::Recorded,
};

const CONFLIST: &str = "10-x.conflist";

/// A directory of the host that only root may change.
fn conf_dir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(CONFLIST), "{}").unwrap();
    dir
}

fn node_with_linked_spool(conf_dir: &Path) -> Node {
    let node = Node::new().with_state(ENROLLED_FILE, "bank\n");
    symlink(conf_dir, node.state_dir().join("spool")).unwrap();
    node
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[test]
fn a_del_writes_nothing_through_a_linked_spool() {
    let conf_dir = conf_dir();
    for target in [conf_dir.path().to_owned(), conf_dir.path().join("missing")] {
        let node = node_with_linked_spool(&target);
        let run = node.run(&Recorded::number("05"));
        run.printed("");
        let log = run.log();
        assert_eq!(log["message"], "Could not report or spool the deletion");
        let error = log["error"].as_str().unwrap();
        assert!(error.contains("spool: it is a symlink; remove it"), "{log}");
        assert_eq!(names(conf_dir.path()), [CONFLIST]);
    }
}

#[test]
fn an_add_waits_if_the_spool_is_a_link() {
    let conf_dir = conf_dir();
    let node = node_with_linked_spool(conf_dir.path());
    let run = node.run(&Recorded::number("04"));
    assert_eq!(run.error_code(), 11);
    let msg = run.error()["msg"].to_string();
    assert!(msg.contains("spool: it is a symlink; remove it"), "{msg}");
    assert_eq!(names(conf_dir.path()), [CONFLIST]);
}

#[test]
fn the_kill_switch_admits_pods_if_the_spool_is_a_link() {
    let conf_dir = conf_dir();
    let node = node_with_linked_spool(conf_dir.path()).with_state(DISABLED_FILE, "");
    let call = Recorded::number("04");
    node.run(&call).printed(&call.key("prevResult").unwrap());
    assert_eq!(names(conf_dir.path()), [CONFLIST]);
}

/// Puts an object in place of the list.
type Replace = fn(PathBuf);

#[test]
fn an_add_waits_if_the_list_is_not_a_bounded_regular_file() {
    let replacements: [(&str, Replace); 4] = [
        ("symlink", |list| symlink("/dev/zero", list).unwrap()),
        ("symlink", |list| symlink("/etc/passwd", list).unwrap()),
        ("not a regular file", |list| {
            mkfifo(&list, Mode::S_IRWXU).unwrap();
        }),
        ("larger than 4194304 bytes", |list| {
            File::create(list).unwrap().set_len(5 << 20).unwrap();
        }),
    ];
    let call = Recorded::number("04");
    for (problem, replace) in replacements {
        let node = Node::new().with_state(ENROLLED_FILE, "bank\n");
        // A pod of an unlisted namespace starts only if the list is readable.
        node.run(&call).printed(&call.key("prevResult").unwrap());
        let list = node.state_dir().join(ENROLLED_FILE);
        fs::remove_file(&list).unwrap();
        replace(list.clone());
        let run = node.run(&call);
        assert_eq!(run.error_code(), 11, "{run:?}");
        let expected = format!(
            "the list of enrolled namespaces cannot be read: {}: it is ",
            list.display()
        );
        let error = run.error();
        let msg = error["msg"].as_str().unwrap();
        assert!(msg.contains(&expected) && msg.contains(problem), "{msg}");
        assert!(run.took < TIMEOUT, "{run:?}");
    }
}
