//! Waiting for locks of a netns, with a timeout.

use std::{
    fs::{self, File, OpenOptions},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use netconfig::{Backend, BackendError, ProgramError, apply::Applied, error::ApplyError};

use crate::backends::tools::{IPTABLES, everything, faked, locks, programs, writer_by};
use crate::support::{Fresh, ambient, sandbox};

/// Timeout of an iptables program.
const TIMEOUT: Duration = Duration::from_secs(2);

fn file(fresh: &Fresh, which: &str) -> PathBuf {
    let id = fresh.netns.id();
    locks().join(format!("{}-{}.{which}", id.inode, id.cookie))
}

/// Holds a netns's lock like another process.
fn hold(fresh: &Fresh, which: &str) -> File {
    let mut options = OpenOptions::new();
    fs::create_dir_all(locks()).unwrap();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(file(fresh, which));
    let file = file.unwrap();
    file.lock().unwrap();
    file
}

fn apply(backend: Backend, fresh: &Fresh) -> Result<Applied, ApplyError> {
    let writer = writer_by(backend, programs().with_timeout(TIMEOUT));
    writer.apply(&fresh.netns, &ambient(), &sandbox("c1"))
}

fn lock_of(error: ApplyError) -> String {
    let ApplyError::Backend {
        source: BackendError::Program(ProgramError::Locked { lock }),
        ..
    } = error
    else {
        panic!("{error:?}");
    };
    lock
}

#[test]
fn a_lock_that_stays_held_is_waited_for_and_named_and_nothing_is_written() {
    let cases = [
        (Backend::IptablesLegacy, "xtables", Duration::from_secs(1)),
        (Backend::IptablesLegacy, "lock", TIMEOUT),
        (Backend::IptablesLegacy, "program", TIMEOUT / 2),
        (Backend::IptablesNft, "lock", TIMEOUT),
        (Backend::IptablesNft, "program", TIMEOUT / 2),
    ];
    for (backend, which, at_least) in cases {
        let fresh = Fresh::new();
        let before = everything(&fresh);
        let _held = hold(&fresh, which);
        let began = Instant::now();
        let error = apply(backend, &fresh).unwrap_err();
        let took = began.elapsed();
        assert!(took >= at_least, "{which}: {took:?}");
        assert_eq!(lock_of(error), file(&fresh, which).display().to_string());
        assert_eq!(everything(&fresh), before);
    }
}

#[test]
fn a_lock_that_comes_free_in_time_delays_and_no_more() {
    let held_for = Duration::from_millis(300);
    for (backend, which) in [
        (Backend::IptablesLegacy, "xtables"),
        (Backend::IptablesLegacy, "lock"),
        (Backend::IptablesNft, "program"),
    ] {
        let fresh = Fresh::new();
        let held = hold(&fresh, which);
        let began = Instant::now();
        let applied = thread::scope(|scope| {
            let applying = scope.spawn(|| apply(backend, &fresh));
            thread::sleep(held_for);
            drop(held);
            applying.join().unwrap()
        });
        assert!(applied.unwrap().changed);
        assert!(began.elapsed() >= held_for, "{which}");
    }
}

/// The lock is not the default one of all netns, the environment is empty, and names are not resolved.
#[test]
fn a_program_is_given_a_lock_of_its_netns_and_little_else() {
    let directory = tempfile::tempdir().unwrap();
    let (seen, name) = (directory.path().join("seen"), "iptables-legacy-restore");
    let script = format!(
        "(tr '\\0' '\\n' < /proc/$$/environ; wc -c < /etc/nsswitch.conf) > {}\n\
         exec /usr/sbin/{name} \"$@\"",
        seen.display()
    );
    let (_directory, programs) = faked(&[(name, &script)]);
    let fresh = Fresh::new();
    let writer = writer_by(Backend::IptablesLegacy, programs);
    writer
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    let lock = format!("XTABLES_LOCKFILE={}", file(&fresh, "xtables").display());
    assert_eq!(
        fs::read_to_string(seen).unwrap(),
        format!("LC_ALL=C\n{lock}\n0\n")
    );
}

#[test]
fn no_lock_is_left() {
    for backend in IPTABLES {
        let fresh = Fresh::new();
        apply(backend, &fresh).unwrap();
        for which in ["lock", "program", "xtables"] {
            assert!(!file(&fresh, which).exists(), "{which}");
        }
    }
}

/// Calls for one netns are serialized; others do not wait.
#[test]
fn many_at_once_leave_what_one_leaves() {
    for backend in IPTABLES {
        let (fresh, alone) = (Fresh::new(), Fresh::new());
        assert!(apply(backend, &alone).unwrap().changed);
        thread::scope(|scope| {
            let read = || {
                writer_by(backend, programs())
                    .observe(&fresh.netns)
                    .unwrap()
            };
            let readers: Vec<_> = (0..3).map(|_| scope.spawn(read)).collect();
            assert!(
                writer_by(backend, programs())
                    .apply(&fresh.netns, &ambient(), &sandbox("c1"))
                    .unwrap()
                    .changed
            );
            for reader in readers {
                reader.join().unwrap();
            }
        });
        assert_eq!(everything(&fresh), everything(&alone));
    }
}
