//! Files in `stateDir` that decide calls while the agent is unreachable: the kill switch, and the enrolled namespaces,
//! which `pod-events` writes with the code below.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, ErrorKind},
    path::Path,
};

use inpod_types::NamespaceName;

use crate::directory::Directory;

/// Only `pod-events` writes this file, by rename; the content stays valid across reboots.
pub const ENROLLED_FILE: &str = "enrolled-namespaces";

/// While this file exists, the plugin passes every call through. `installer disable` creates the file.
pub const DISABLED_FILE: &str = "disabled";

/// Holds 65,536 names of 63 characters. Kubernetes supports clusters of about 10,000 namespaces.
const MAX_ENROLLED_BYTES: u64 = 4 << 20;

/// Namespaces with actual or possible pods in the mesh, one per line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolledNamespaces(String);

impl EnrolledNamespaces {
    /// Returns `None` if `pod-events` has never run on this node.
    ///
    /// # Errors
    ///
    /// Fails if the list cannot be read, is no regular file, or is larger than 4 MiB.
    pub fn read(state_dir: &Path) -> io::Result<Option<Self>> {
        let read = Directory::open(state_dir)
            .and_then(|directory| directory.read_text(ENROLLED_FILE, MAX_ENROLLED_BYTES));
        match read {
            Ok(text) => Ok(Some(Self(text))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => {
                let path = state_dir.join(ENROLLED_FILE);
                let problem = format!("{}: {error}", path.display());
                Err(io::Error::new(error.kind(), problem))
            }
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
        let directory = Directory::open_or_create(state_dir)?;
        // A crashed writer leaves a temporary file. If the removal fails, the next step reports why.
        let _ignored = directory.remove_file(&format!(".{ENROLLED_FILE}"));
        directory.write_file(ENROLLED_FILE, self.0.as_bytes())
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
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::directory::testing::{Foreign, Obstacle};

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
    fn only_a_regular_file_is_read_as_the_list() {
        for obstacle in Obstacle::ALL {
            let (dir, foreign) = (tempfile::tempdir().unwrap(), Foreign::new());
            let path = dir.path().join(ENROLLED_FILE);
            foreign.put(obstacle, &path);
            let problem = if obstacle.is_link() {
                "it is a symlink; remove it"
            } else if obstacle == Obstacle::LargeFile {
                "it is larger than 4194304 bytes; remove it"
            } else {
                "it is not a regular file; remove it"
            };
            let error = EnrolledNamespaces::read(dir.path()).unwrap_err();
            let expected = format!("{}: {problem}", path.display());
            assert_eq!(error.to_string(), expected, "{obstacle:?}");
        }
    }

    #[test]
    fn a_list_of_the_maximum_size_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let line = format!("{:n<63}\n", "");
        let count = usize::try_from(MAX_ENROLLED_BYTES).unwrap() / line.len();
        let path = dir.path().join(ENROLLED_FILE);
        fs::write(&path, line.repeat(count)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), MAX_ENROLLED_BYTES);
        let list = EnrolledNamespaces::read(dir.path()).unwrap().unwrap();
        assert!(list.contains(&line.trim().parse().unwrap()));
    }

    #[test]
    fn a_written_list_replaces_everything_but_a_directory() {
        let written = EnrolledNamespaces::of(&BTreeSet::from(["bank".parse().unwrap()]));
        for obstacle in Obstacle::ALL {
            let (dir, foreign) = (tempfile::tempdir().unwrap(), Foreign::new());
            let temporary = dir.path().join(format!(".{ENROLLED_FILE}"));
            for path in [dir.path().join(ENROLLED_FILE), temporary] {
                foreign.put(obstacle, &path);
            }
            let is_written = written.write(dir.path()).is_ok();
            assert_eq!(is_written, obstacle != Obstacle::Directory, "{obstacle:?}");
            if is_written {
                let read = EnrolledNamespaces::read(dir.path()).unwrap();
                assert_eq!(read.as_ref(), Some(&written), "{obstacle:?}");
            }
            foreign.assert_untouched();
        }
    }

    #[test]
    fn state_dir_itself_may_be_a_symlink() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("target")).unwrap();
        let state_dir = dir.path().join("link");
        symlink("target", &state_dir).unwrap();
        let written = EnrolledNamespaces::of(&BTreeSet::from(["shop".parse().unwrap()]));
        written.write(&state_dir).unwrap();
        assert_eq!(EnrolledNamespaces::read(&state_dir).unwrap(), Some(written));
    }

    #[test]
    fn the_kill_switch_is_a_file_of_any_content() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_disabled(dir.path()));
        fs::write(dir.path().join(DISABLED_FILE), "").unwrap();
        assert!(is_disabled(dir.path()));
    }

    #[test]
    fn the_kill_switch_is_set_by_anything_of_its_name() {
        for obstacle in Obstacle::ALL {
            let (dir, foreign) = (tempfile::tempdir().unwrap(), Foreign::new());
            foreign.put(obstacle, &dir.path().join(DISABLED_FILE));
            assert!(is_disabled(dir.path()), "{obstacle:?}");
        }
    }
}
