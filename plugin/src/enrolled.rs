//! What the plugin knows when the agent is away: two files in its `stateDir`, written by others and only read here.

use std::{fs, io, path::Path};

use workload::NamespaceName;

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
