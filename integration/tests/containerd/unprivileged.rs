//! Containers are given no capability, and no process has one.

use std::fs;

use anyhow::Context as _;
use serde_json::Value;

use crate::kubelet::{Resident, Role};

const SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

/// In OCI's runtime specification (configuration, "Linux Process").
const ASKED: [&str; 5] = [
    "inheritable",
    "permitted",
    "effective",
    "bounding",
    "ambient",
];

fn processes(container: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        // The process may end meanwhile.
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

/// It has a capability, or could gain one.
fn has_capability(status: &str) -> bool {
    let given = |set: &&str| u64::from_str_radix(field(status, set), 16).unwrap() > 0;
    SETS.iter().any(given)
}

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

/// No container, running or ended, has a capability.
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
    // Control: the sandbox's own container has some.
    let sandbox = processes(&resident.pod.container_id);
    let has = sandbox.iter().any(|status| has_capability(status));
    assert!(has, "{sandbox:?}");
}
