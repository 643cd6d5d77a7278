use std::{fs::File, os::unix::fs::PermissionsExt as _};

use super::*;
use crate::directory::testing::{Foreign, Obstacle};

fn entry() -> Entry {
    let sandbox = SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: "c1".parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    };
    Entry::new(SpooledVerb::Add, Cause::AgentAway, sandbox)
}

fn names(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir.join(SPOOL_DIR)).unwrap();
    files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn an_entry_is_read_back_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let written = Entry {
        pod: Some(NamedPod {
            namespace: "shop".parse().unwrap(),
            name: "web-0".parse().unwrap(),
            uid: Some("1111".parse().unwrap()),
        }),
        netns: Some(NetnsRef {
            device: Some(4),
            inode: Some(7),
            ..NetnsRef::from_path("/run/netns/a")
        }),
        addresses: vec!["10.0.0.2".parse().unwrap(), "fd77::2".parse().unwrap()],
        ..entry()
    };
    written.write(dir.path()).unwrap();
    let [name] = names(dir.path()).try_into().unwrap();
    let content = fs::read(dir.path().join(SPOOL_DIR).join(name)).unwrap();
    assert_eq!(serde_json::from_slice::<Entry>(&content).unwrap(), written);
}

#[test]
fn the_format_is_the_one_that_is_documented() {
    let entry = Entry {
        time_unix_ms: 5,
        boot_id: "b".into(),
        ..entry()
    };
    assert_eq!(
        serde_json::to_string(&entry).unwrap(),
        r#"{"schema":1,"verb":"ADD","cause":"agent-away","time_unix_ms":5,"boot_id":"b","sandbox":{"network_name":"net","container_id":"c1","ifname":"eth0"},"addresses":[]}"#
    );
}

#[test]
fn an_entry_has_the_id_of_its_boot() {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(entry().boot_id, boot_id.trim());
}

#[test]
fn a_sandbox_is_checked_when_it_is_read() {
    let bad = serde_json::to_string(&entry())
        .unwrap()
        .replace("c1", "../c1");
    let error = serde_json::from_str::<Entry>(&bad).unwrap_err();
    assert!(error.to_string().contains("../c1"), "{error}");
}

#[test]
fn only_the_owner_may_look_into_the_spool() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("inpod/plugin");
    entry().write(&state_dir).unwrap();
    let [name] = names(&state_dir).try_into().unwrap();
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(state_dir.join(SPOOL_DIR)), 0o700);
    assert_eq!(mode(state_dir.join(SPOOL_DIR).join(name)), 0o600);
}

#[test]
fn nothing_is_left_of_an_entry_that_cannot_be_put_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let entry = entry();
    // A directory in place of the file blocks the rename.
    fs::create_dir_all(dir.path().join(SPOOL_DIR).join(entry.file_name())).unwrap();
    let error = entry.write(dir.path()).unwrap_err();
    assert!(error.to_string().contains("spool"), "{error}");
    assert_eq!(names(dir.path()), [entry.file_name()]);
}

#[test]
fn names_sort_by_time() {
    let at = |time_unix_ms| {
        Entry {
            time_unix_ms,
            ..entry()
        }
        .file_name()
    };
    assert!(at(999) < at(1000));
    assert!(at(1_795_247_003_024) < at(11_795_247_003_024));
}

#[test]
fn a_spool_without_a_reader_stops_growing() {
    let dir = tempfile::tempdir().unwrap();
    let spool = dir.path().join(SPOOL_DIR);
    fs::create_dir(&spool).unwrap();
    for n in 1..MAX_ENTRIES {
        File::create(spool.join(n.to_string())).unwrap();
    }
    entry().write(dir.path()).unwrap();
    assert!(matches!(
        entry().write(dir.path()),
        Err(SpoolError::Full(_))
    ));
}

#[test]
fn a_spool_is_written_only_if_it_is_a_directory() {
    for obstacle in Obstacle::ALL {
        let (dir, foreign) = (tempfile::tempdir().unwrap(), Foreign::new());
        let spool = dir.path().join(SPOOL_DIR);
        foreign.put(obstacle, &spool);
        let written = entry().write(dir.path()).map_err(|error| error.to_string());
        let problem = if obstacle.is_link() {
            "it is a symlink; remove it"
        } else {
            "it is not a directory; remove it"
        };
        let expected = if obstacle == Obstacle::Directory {
            Ok(())
        } else {
            Err(format!("cannot write to {}: {problem}", spool.display()))
        };
        assert_eq!(written, expected, "{obstacle:?}");
        foreign.assert_untouched();
    }
}

#[test]
fn an_entry_follows_no_symlink_inside_the_spool() {
    for obstacle in Obstacle::ALL.into_iter().filter(|it| it.is_link()) {
        let (dir, foreign, entry) = (tempfile::tempdir().unwrap(), Foreign::new(), entry());
        let spool = dir.path().join(SPOOL_DIR);
        fs::create_dir(&spool).unwrap();
        let path = spool.join(entry.file_name());
        foreign.put(obstacle, &path);
        entry.write(dir.path()).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        foreign.put(obstacle, &spool.join(format!(".{}", entry.file_name())));
        entry.write(dir.path()).unwrap_err();
        foreign.assert_untouched();
    }
}
