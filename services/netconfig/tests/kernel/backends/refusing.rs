//! Half-failed changes are undone; steps that cannot be undone are reported.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use netconfig::{
    Backend, BackendError, Family, ProgramError, Programs,
    error::ApplyError,
    rules::{Redirection, scenarios},
};

use crate::backends::tools::{
    IPTABLES, applied, apply, differences, everything, faked, locks, program, restore, runner,
    saved, write_script, writer, writer_by,
};
use crate::support::{Fresh, ambient, plain, sandbox};

const REFUSES: &str = "echo 'it is not my day' >&2; exit 1";

/// Accepts every table except nat.
fn refuses_nat(backend: Backend) -> String {
    let real = program(backend, Family::V4, "restore");
    format!("sed 's/^\\*nat$/&\\n-A NO_SUCH_CHAIN -j DROP/' | /usr/sbin/{real} \"$@\"")
}

/// All but the refused part must be undone.
fn refusal(error: ApplyError) -> String {
    let ApplyError::Backend {
        source: BackendError::Program(error @ ProgramError::Refused { .. }),
        undo_failures,
    } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(undo_failures, [""; 0]);
    error.to_string()
}

/// The last scenario is refused and changes nothing.
fn is_refused_and_left_as_it_was(backend: Backend, programs: &Programs, fresh: &Fresh) -> String {
    let before = everything(fresh);
    let (_, settings) = scenarios::all().last().unwrap();
    let redirection = Redirection::Ambient(settings);
    let writer = writer_by(backend, programs.clone());
    let applied = writer.apply(&fresh.netns, &redirection, &sandbox("c1"));
    let refused = refusal(applied.unwrap_err());
    assert_eq!(everything(fresh), before, "{backend}");
    refused
}

#[test]
fn where_the_second_family_is_refused_the_first_one_is_as_it_was() {
    for backend in IPTABLES {
        let name = program(backend, Family::V6, "restore");
        let (_directory, programs) = faked(&[(name, REFUSES)]);
        for fresh in [Fresh::new(), applied(backend)] {
            let refused = is_refused_and_left_as_it_was(backend, &programs, &fresh);
            assert!(
                refused.contains(name) && refused.contains("it is not my day"),
                "{refused}"
            );
        }
    }
}

#[test]
fn where_the_second_table_is_refused_the_first_one_is_as_it_was() {
    for backend in IPTABLES {
        let name = program(backend, Family::V4, "restore");
        let (_directory, programs) = faked(&[(name, &refuses_nat(backend))]);
        for fresh in [Fresh::new(), applied(backend)] {
            is_refused_and_left_as_it_was(backend, &programs, &fresh);
        }
    }
}

/// Another process owns the table, which cannot be changed.
#[test]
fn a_refusal_of_the_kernel_is_told_with_the_line_that_is_refused() {
    let fresh = Fresh::new();
    let mut nft = Command::new("nft");
    nft.arg("-i").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut owner = fresh.run(move || nft.spawn()).unwrap();
    let script = b"add table ip6 nat { flags owner; }\n";
    owner.stdin.as_mut().unwrap().write_all(script).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !fresh.nft("list ruleset").contains("owner") {
        assert!(Instant::now() < deadline, "nft did not make its table");
    }
    let (_directory, programs) = faked(&[]);
    let refused = is_refused_and_left_as_it_was(Backend::IptablesNft, &programs, &fresh);
    assert!(
        refused.contains("ip6tables-nft-restore refused"),
        "{refused}"
    );
    assert!(refused.contains("Operation not permitted"), "{refused}");
    owner.kill().unwrap();
    owner.wait().unwrap();
}

/// The new rules were verified; without them traffic would leak.
#[test]
fn where_the_old_rules_cannot_all_be_deleted_the_new_ones_stay_and_it_is_told() {
    for form in IPTABLES {
        for backend in Backend::ALL.into_iter().filter(|backend| *backend != form) {
            let name = program(form, Family::V6, "restore");
            let (_directory, programs) = faked(&[(name, REFUSES)]);
            let fresh = applied(form);
            let writer_of_both = writer_by(backend, programs);
            let refused = writer_of_both.apply(&fresh.netns, &ambient(), &sandbox("c1"));
            let ApplyError::Backend { undo_failures, .. } = refused.unwrap_err() else {
                panic!("another error");
            };
            assert!(
                undo_failures[0].contains("the new rules stay"),
                "{undo_failures:?}"
            );
            let left = differences(backend, &fresh);
            assert_eq!(left, [format!("rules of inpod are left in {form}")]);
            assert!(saved(&fresh, form, Family::V6).contains("INPOD_OUTPUT"));
            assert!(apply(backend, &fresh));
            assert_eq!(
                everything(&fresh),
                everything(&applied(backend)),
                "{form} {backend}"
            );
        }
    }
}

#[test]
fn programs_that_are_missing_are_named() {
    let fresh = Fresh::new();
    let before = everything(&fresh);
    let nowhere = Programs::search_in(&[Path::new("/nowhere")], runner(), &locks());
    for backend in IPTABLES {
        let writer = writer_by(backend, nowhere.clone());
        let applied = writer.apply(&fresh.netns, &ambient(), &sandbox("c1"));
        let ApplyError::Backend { source, .. } = applied.unwrap_err() else {
            panic!("another error");
        };
        for act in ["save", "restore"] {
            for family in Family::ALL {
                let name = program(backend, family, act);
                assert!(source.to_string().contains(name), "{source}");
            }
        }
    }
    assert_eq!(everything(&fresh), before);
}

/// Netlink shows rules of iptables-nft by their chains' names; only its programs can read them.
#[test]
fn rules_that_cannot_be_read_for_want_of_programs_are_not_overlooked() {
    let fresh = applied(Backend::IptablesNft);
    let verified = plain().verify(&fresh.netns, &ambient());
    let error = format!("{:?}", verified.unwrap_err());
    assert!(
        error.contains("Missing") && error.contains("ip6tables-nft-save"),
        "{error}"
    );
}

#[test]
fn a_program_that_cannot_be_started_or_prints_no_list_is_told() {
    let fresh = Fresh::new();
    for (script, told) in [
        ("exit 0\n#", None),
        (
            "echo '*nat'",
            Some("cannot read what iptables-nft-save printed"),
        ),
        ("echo nonsense", Some("at `nonsense`")),
        ("kill -9 $$", Some("signal: 9")),
    ] {
        let (_directory, programs) = faked(&[("iptables-nft-save", script)]);
        let writer = writer_by(Backend::IptablesNft, programs);
        let verified = writer.verify(&fresh.netns, &ambient());
        match told {
            None => assert!(verified.is_ok()),
            Some(told) => {
                let error = std::error::Error::source(&verified.unwrap_err())
                    .unwrap()
                    .to_string();
                assert!(error.contains(told), "{error}");
            }
        }
    }
    let (directory, programs) = faked(&[]);
    let broken = directory.path().join("iptables-nft-save");
    fs::remove_file(&broken).unwrap();
    write_script(&broken, "");
    fs::write(&broken, "\u{7f}ELF and nothing else").unwrap();
    let verified = writer_by(Backend::IptablesNft, programs).verify(&fresh.netns, &ambient());
    let error = format!("{:?}", verified.unwrap_err());
    assert!(
        error.contains("Spawn") && error.contains("iptables-nft-save"),
        "{error}"
    );
}

/// iptables-nft omits tables that it cannot print.
#[test]
fn a_table_that_cannot_be_read_is_not_taken_for_an_empty_one() {
    let backend = Backend::IptablesNft;
    let fresh = applied(backend);
    fresh.nft("add chain ip nat theirs { type filter hook input priority 7; }");
    assert_eq!(differences(backend, &fresh), [""; 0]);
    fresh.nft("add rule ip nat theirs quota 10 mbytes accept");
    fresh.nft("add rule ip nat OUTPUT quota 10 mbytes accept");
    assert!(!saved(&fresh, backend, Family::V4).contains("*nat"));
    let verified = writer(backend).verify(&fresh.netns, &ambient());
    let error = format!("{:?}", verified.unwrap_err());
    assert!(
        error.contains("Unreadable") && error.contains("is incompatible"),
        "{error}"
    );
}

/// A restore that a concurrent change breaks is tried again from the new state.
#[test]
fn a_change_that_somebody_else_overtook_is_done_again() {
    let backend = Backend::IptablesNft;
    let name = program(backend, Family::V4, "restore");
    let directory = tempfile::tempdir().unwrap();
    let once = directory.path().join("once");
    // The first attempt loses a jump just before replacing it.
    let script = format!(
        "if ! test -e {0}; then touch {0}; \
         printf '*nat\\n-F OUTPUT\\nCOMMIT\\n' | /usr/sbin/{name} --noflush; fi; \
         exec /usr/sbin/{name} \"$@\"",
        once.display()
    );
    let fresh = applied(backend);
    let (_fakes, programs) = faked(&[(name, &script)]);
    let (_, settings) = scenarios::all().last().unwrap();
    let redirection = Redirection::Ambient(settings);
    let writer = writer_by(backend, programs);
    let applied = writer.apply(&fresh.netns, &redirection, &sandbox("c1"));
    assert!(applied.unwrap().changed && once.exists());
    let verified = writer.verify(&fresh.netns, &redirection).unwrap();
    assert_eq!(verified.differences, [""; 0]);
    restore(&fresh, backend, Family::V4, "*nat\n-F OUTPUT\nCOMMIT\n");
    assert!(
        !writer
            .verify(&fresh.netns, &redirection)
            .unwrap()
            .differences
            .is_empty()
    );
}
