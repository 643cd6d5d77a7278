//! Files in `stateDir` that decide calls while the agent is unreachable: the kill switch, and the enrolled namespaces,
//! which `pod-events` writes with the code below.

use std::{collections::BTreeSet, fs, io, path::Path};

use inpod_types::NamespaceName;

use crate::durable;

/// Only `pod-events` writes this file, by rename; the content stays valid across reboots.
pub const ENROLLED_FILE: &str = "enrolled-namespaces";

/// While this file exists, the plugin passes every call through. `installer disable` creates the file.
pub const DISABLED_FILE: &str = "disabled";

/// Namespaces with actual or possible pods in the mesh, one per line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolledNamespaces(String);

impl EnrolledNamespaces {
    /// Returns `None` if `pod-events` has never run on this node.
    pub fn read(state_dir: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(state_dir.join(ENROLLED_FILE)) {
            Ok(text) => Ok(Some(Self(text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn of(namespaces: &BTreeSet<NamespaceName>) -> Self {
        let lines = namespaces.iter().map(|name| format!("{name}\n"));
        Self(lines.collect())
    }

    /// Replaces the file atomically and durably. Only one process may write at a time, because all writers use the same
    /// temporary name.
    ///
    /// # Errors
    ///
    /// Fails if the directory or the file cannot be written; the previous file then remains.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        durable::create_dir(state_dir)?;
        // A crashed writer leaves a temporary file. If the removal fails, the next step reports why.
        let _ignored = fs::remove_file(state_dir.join(format!(".{ENROLLED_FILE}")));
        durable::write_file(state_dir, ENROLLED_FILE, self.0.as_bytes())
    }

    /// Returns the names of the namespaces, without the invalid lines.
    pub fn names(&self) -> BTreeSet<NamespaceName> {
        let lines = self.0.lines().filter_map(|line| line.trim().parse().ok());
        lines.collect()
    }

    pub fn contains(&self, namespace: &NamespaceName) -> bool {
        self.0.lines().any(|line| line.trim() == namespace.as_str())
    }
}

pub fn is_disabled(state_dir: &Path) -> bool {
    // A dangling symlink counts as set, because someone created the link on purpose.
    fs::symlink_metadata(state_dir.join(DISABLED_FILE)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_namespace_is_enrolled_if_a_line_is_its_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(ENROLLED_FILE), "shop\nbank \n\nwarehouse").unwrap();
        let enrolled = EnrolledNamespaces::read(dir.path()).unwrap().unwrap();
        for (namespace, expected) in [
            ("shop", true),
            ("bank", true),
            ("warehouse", true),
            ("sho", false),
            ("shop2", false),
        ] {
            assert_eq!(
                enrolled.contains(&namespace.parse().unwrap()),
                expected,
                "{namespace}"
            );
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_replaces_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("inpod/plugin");
        for names in [&["shop", "bank"][..], &["bank"], &[]] {
            let names: BTreeSet<_> = names.iter().map(|name| name.parse().unwrap()).collect();
            let written = EnrolledNamespaces::of(&names);
            written.write(&state_dir).unwrap();
            let read = EnrolledNamespaces::read(&state_dir).unwrap().unwrap();
            assert_eq!((&read, read.names()), (&written, names));
        }
        assert_eq!(fs::read_dir(&state_dir).unwrap().count(), 1);
    }

    #[test]
    fn the_list_is_sorted_one_name_per_line_and_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("plugin");
        let names = ["shop", "bank"].map(|name| name.parse().unwrap());
        EnrolledNamespaces::of(&names.into())
            .write(&state_dir)
            .unwrap();
        let text = fs::read_to_string(state_dir.join(ENROLLED_FILE)).unwrap();
        assert_eq!(text, "bank\nshop\n");
        let mode = fs::metadata(&state_dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_writer_that_died_keeps_no_later_one_from_writing() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(format!(".{ENROLLED_FILE}")), "sho").unwrap();
        let names = BTreeSet::from(["shop".parse().unwrap()]);
        EnrolledNamespaces::of(&names).write(dir.path()).unwrap();
        let read = EnrolledNamespaces::read(dir.path()).unwrap().unwrap();
        assert_eq!(read.names(), names);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_file_differs_from_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(EnrolledNamespaces::read(dir.path()).unwrap(), None);
        fs::write(dir.path().join(ENROLLED_FILE), "").unwrap();
        assert!(EnrolledNamespaces::read(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(ENROLLED_FILE)).unwrap();
        assert!(EnrolledNamespaces::read(dir.path()).is_err());
    }

    #[test]
    fn the_kill_switch_is_a_file_of_any_content() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_disabled(dir.path()));
        fs::write(dir.path().join(DISABLED_FILE), "").unwrap();
        assert!(is_disabled(dir.path()));
    }
}
