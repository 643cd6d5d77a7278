//! What the plugin knows when the agent is away: two files in its `stateDir`, which it only reads. `pod-events` writes
//! one of them, with what stands here beside its reader.

use std::{collections::BTreeSet, fs, io, path::Path};

use inpod_types::NamespaceName;

use crate::durable;

/// The file's name in `stateDir`. `pod-events` alone writes it, by rename; it stays valid across reboots.
pub const ENROLLED_FILE: &str = "enrolled-namespaces";

/// The kill switch's name in `stateDir`: while it is there, every call passes. `installer disable` writes it.
pub const DISABLED_FILE: &str = "disabled";

/// The namespaces that have, or may get, pods in the mesh: one name per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolledNamespaces(String);

impl EnrolledNamespaces {
    /// Reads the file; `None` where there is none, because `pod-events` has never run here.
    ///
    /// # Errors
    ///
    /// When the file is there and cannot be read.
    pub fn read(state_dir: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(state_dir.join(ENROLLED_FILE)) {
            Ok(text) => Ok(Some(Self(text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The list of these namespaces: sorted, a line each.
    pub fn of(namespaces: &BTreeSet<NamespaceName>) -> Self {
        let lines = namespaces.iter().map(|name| format!("{name}\n"));
        Self(lines.collect())
    }

    /// Puts the list in place of an earlier one, whole or not at all, also after a power failure. Makes the directory
    /// where it is missing. Only one process may write at a time.
    ///
    /// # Errors
    ///
    /// When it cannot be written; then an earlier one is still there.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        durable::create_dir(state_dir)?;
        // Left by a writer that died; if it stays, the next step says why.
        let _ignored = fs::remove_file(state_dir.join(format!(".{ENROLLED_FILE}")));
        durable::write_file(state_dir, ENROLLED_FILE, self.0.as_bytes())
    }

    /// The namespaces. Lines that name none are left out.
    pub fn names(&self) -> BTreeSet<NamespaceName> {
        let lines = self.0.lines().filter_map(|line| line.trim().parse().ok());
        lines.collect()
    }

    /// Whether pods of a namespace may be in the mesh.
    pub fn contains(&self, namespace: &NamespaceName) -> bool {
        self.0.lines().any(|line| line.trim() == namespace.as_str())
    }
}

/// Whether the kill switch is set.
pub fn is_disabled(state_dir: &Path) -> bool {
    // A dangling link is a switch, too: whoever put it there meant something.
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
    fn no_file_is_told_from_an_empty_one() {
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
