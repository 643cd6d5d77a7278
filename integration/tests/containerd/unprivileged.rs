//! Containers are unprivileged: they are given no capability, and none of their processes has one.

use std::fs;

use anyhow::Context as _;
use serde_json::Value;

use crate::kubelet::{Resident, Role};

/// The capability sets of a process (proc(5), `/proc/pid/status`).
const SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

/// The same in the runtime's configuration (OCI runtime specification, configuration, "Linux Process").
const ASKED: [&str; 5] = [
    "inheritable",
    "permitted",
    "effective",
    "bounding",
    "ambient",
];

/// Returns the kernel's status of each process in a container's cgroup.
fn processes(container: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        // A process may end while it is inspected.
        let cgroup = fs::read_to_string(path.join("cgroup")).ok()?;
        let status = fs::read_to_string(path.join("status")).ok()?;
        cgroup.contains(container).then_some(status)
    };
    paths.filter_map(read).collect()
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.strip_prefix(':'))
        .with_context(|| name.to_owned())
        .unwrap()
        .trim()
}

/// Returns whether a process has a capability, or could gain one.
fn has_capability(status: &str) -> bool {
    let given = |set: &&str| u64::from_str_radix(field(status, set), 16).unwrap() > 0;
    SETS.iter().any(given)
}

/// Checks the security context that the runtime received for a container.
fn assert_asked(resident: &Resident<'_>, role: Role, id: &str) {
    let (_, info) = resident.runtime.cri.container(id).unwrap();
    let info: Value = serde_json::from_str(&info).unwrap();
    let process = info.pointer("/runtimeSpec/process").unwrap();
    for set in ASKED {
        let pointer = format!("/capabilities/{set}");
        let given = process.pointer(&pointer).and_then(Value::as_array);
        assert!(given.is_none_or(Vec::is_empty), "{role:?}: {process}");
    }
    let uid = process.pointer("/user/uid").and_then(Value::as_u64);
    assert!(uid.unwrap() > 0, "{role:?}: {process}");
    let stays = process.pointer("/noNewPrivileges");
    assert_eq!(stays, Some(&Value::Bool(true)), "{role:?}");
}

/// Expects that no container of a pod has a capability, whether it runs or has ended.
pub(crate) fn assert_unprivileged(resident: &Resident<'_>) {
    for (role, run) in &resident.runs {
        assert_asked(resident, *role, &run.id);
        let processes = processes(&run.id);
        assert_eq!(processes.is_empty(), *role == Role::Validation, "{role:?}");
        for status in processes {
            assert!(!has_capability(&status), "{role:?}: {status}");
            assert_eq!(field(&status, "NoNewPrivs"), "1", "{role:?}");
            assert!(!field(&status, "Uid").starts_with("0\t"), "{status}");
        }
    }
    // Control: the runtime's own container of the sandbox has some.
    let sandbox = processes(&resident.pod.container_id);
    let has = sandbox.iter().any(|status| has_capability(status));
    assert!(has, "{sandbox:?}");
}
