//! Writers with programs, and a netns's content as the tools show it.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use netconfig::{Backend, Family, Programs, Variant, apply::Writer};
use tempfile::TempDir;

use crate::programs::install_program;
use crate::support::{Fresh, ambient, sandbox};

/// Of iptables, on the machines that run tests.
pub(crate) const DIRECTORIES: [&str; 2] = ["/usr/sbin", "/sbin"];

pub(crate) fn runner() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_netconfig"))
}

pub(crate) fn locks() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("locks")
}

pub(crate) fn programs() -> Programs {
    static FOUND: OnceLock<Programs> = OnceLock::new();
    let find = || {
        let found = Programs::search_in(&DIRECTORIES.map(Path::new), runner(), &locks());
        for variant in Variant::ALL {
            let missing = found.missing(variant);
            assert!(
                missing.is_empty(),
                "install iptables: {} missing",
                missing.join(", ")
            );
        }
        found
    };
    FOUND.get_or_init(find).clone()
}

pub(crate) fn writer(backend: Backend) -> Writer {
    writer_by(backend, programs())
}

pub(crate) fn writer_by(backend: Backend, programs: Programs) -> Writer {
    Writer {
        configured: Some(backend),
        detected: backend,
        programs,
        ..Writer::default()
    }
}

/// Returns a writer with a detected backend, for pods without rules.
pub(crate) fn detected(backend: Backend) -> Writer {
    Writer {
        configured: None,
        ..writer(backend)
    }
}

/// Has ambient mode's default redirection.
pub(crate) fn applied(backend: Backend) -> Fresh {
    let fresh = Fresh::new();
    apply(backend, &fresh);
    fresh
}

pub(crate) fn apply(backend: Backend, fresh: &Fresh) -> bool {
    let applied = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
    applied.unwrap().changed
}

pub(crate) fn differences(backend: Backend, fresh: &Fresh) -> Vec<String> {
    let verified = writer(backend).verify(&fresh.netns, &ambient());
    verified.unwrap().differences
}

pub(crate) fn is_reported_and_repaired(backend: Backend, fresh: &Fresh, named: &str) {
    let reported = differences(backend, fresh);
    assert!(
        reported.iter().any(|sentence| sentence.contains(named)),
        "{named}: {reported:?}"
    );
    assert!(apply(backend, fresh));
    assert_eq!(differences(backend, fresh), [""; 0]);
}

pub(crate) const IPTABLES: [Backend; 2] = [Backend::IptablesNft, Backend::IptablesLegacy];

pub(crate) fn program(backend: Backend, family: Family, act: &str) -> &'static str {
    match (backend, family, act) {
        (Backend::IptablesNft, Family::V4, "save") => "iptables-nft-save",
        (Backend::IptablesNft, Family::V4, "restore") => "iptables-nft-restore",
        (Backend::IptablesNft, Family::V6, "save") => "ip6tables-nft-save",
        (Backend::IptablesNft, Family::V6, "restore") => "ip6tables-nft-restore",
        (Backend::IptablesLegacy, Family::V4, "save") => "iptables-legacy-save",
        (Backend::IptablesLegacy, Family::V4, "restore") => "iptables-legacy-restore",
        (Backend::IptablesLegacy, Family::V6, "save") => "ip6tables-legacy-save",
        (Backend::IptablesLegacy, Family::V6, "restore") => "ip6tables-legacy-restore",
        other => panic!("{other:?}"),
    }
}

/// Returns iptables-save without comments, which contain the time.
pub(crate) fn saved(fresh: &Fresh, backend: Backend, family: Family) -> String {
    let printed = fresh.command(program(backend, family, "save"), &[]);
    let lines = printed.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

/// By default all netns share one lock.
pub(crate) const RESTORE: [&str; 3] = ["--noflush", "-w", "20"];

pub(crate) fn restore(fresh: &Fresh, backend: Backend, family: Family, script: &str) {
    let program = program(backend, family, "restore");
    let script = script.to_owned();
    fresh.run(move || feed(program, &RESTORE, &script));
}

/// Runs a program with this standard input in the calling thread's netns.
pub(crate) fn feed(program: &str, arguments: &[&str], text: &str) {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    assert!(child.wait().unwrap().success(), "{program}: {text}");
}

/// Returns rules, routes and ip rules. Empty built-in chains of iptables are omitted: it creates them at first use
/// and never removes them.
pub(crate) fn everything(fresh: &Fresh) -> String {
    let mut shown = String::new();
    for arguments in [
        "rule",
        "-6 rule",
        "route show table all",
        "-6 route show table all",
    ] {
        shown += &fresh.ip(arguments);
    }
    shown += &native(&fresh.nft("list ruleset"));
    for backend in IPTABLES {
        for family in Family::ALL {
            for table in tables(&saved(fresh, backend, family)) {
                shown += &format!("{backend} {family} {table}");
            }
        }
    }
    shown
}

/// Returns non-empty tables in a fixed order: iptables-legacy lists the last used table first.
fn tables(saved: &str) -> Vec<String> {
    let parts = saved.split("COMMIT\n").filter_map(|part| {
        let lines: Vec<_> = part.lines().filter(|line| is_of_somebody(line)).collect();
        // More than the table's name.
        (lines.len() > 1).then(|| lines.join("\n") + "\n")
    });
    let mut tables: Vec<_> = parts.collect();
    tables.sort();
    tables
}

/// Returns tables that nft created; iptables-nft's are read with its own program.
fn native(listed: &str) -> String {
    let (mut kept, mut shown) = (true, String::new());
    for line in listed.lines() {
        if line.starts_with("table ") {
            kept = !["raw {", "mangle {", "nat {"].iter().any(|name| {
                ["table ip ", "table ip6 "]
                    .iter()
                    .any(|family| line == format!("{family}{name}"))
            });
        }
        if kept {
            shown += line;
            shown.push('\n');
        }
    }
    shown
}

fn is_of_somebody(line: &str) -> bool {
    let is_own_chain = line.starts_with(':') && line.ends_with(" ACCEPT [0:0]");
    !is_own_chain
}

/// Removes our tags, since a script's result has none.
pub(crate) fn untagged(text: &str) -> String {
    let mut kept = String::new();
    for line in text.lines() {
        if line.contains("comment \"inpod schema=") && !line.contains("--comment") {
            continue;
        }
        let Some((before, rest)) = line.split_once("-m comment --comment ") else {
            kept += line;
            kept.push('\n');
            continue;
        };
        let (_, after) = rest.split_once(" -j").unwrap();
        kept += &format!("{before}-j{after}\n");
    }
    kept
}

/// Returns this machine's programs, some replaced by scripts.
pub(crate) fn faked(fakes: &[(&str, &str)]) -> (TempDir, Programs) {
    let directory = tempfile::tempdir().unwrap();
    for backend in IPTABLES {
        for family in Family::ALL {
            for act in ["save", "restore"] {
                let name = program(backend, family, act);
                let path = directory.path().join(name);
                match fakes.iter().find(|(fake, _)| *fake == name) {
                    None => symlink(Path::new("/usr/sbin").join(name), path).unwrap(),
                    Some((_, script)) => write_script(&path, script),
                }
            }
        }
    }
    let programs = Programs::search_in(&[directory.path()], runner(), &locks());
    (directory, programs)
}

pub(crate) fn write_script(path: &Path, script: &str) {
    let written = path.with_extension("script");
    fs::write(&written, format!("#!/bin/sh\n{script}\n")).unwrap();
    install_program(&written, path);
}
