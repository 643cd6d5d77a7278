use std::{
    ffi::OsStr,
    path::{Component, Path},
};

/// A path split in two: the directory is resolved, while a link in the last component is not followed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Split<'a> {
    pub(crate) directory: &'a Path,
    pub(crate) name: &'a OsStr,
}

/// Returns `None` if the path is relative, contains `..` or has no last component.
pub(crate) fn split(path: &Path) -> Option<Split<'_>> {
    let mut components = path.components();
    let plain = components.next() == Some(Component::RootDir)
        && components.all(|component| matches!(component, Component::Normal(_)));
    let split = Split {
        directory: path.parent()?,
        name: path.file_name()?,
    };
    plain.then_some(split)
}

/// Recognizes the netns of a process or of a thread in procfs.
pub(crate) fn is_procfs_netns(directory: &Path, name: &OsStr) -> bool {
    name == "net" && directory.file_name() == Some(OsStr::new("ns"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(path: &str) -> Option<(&str, &str)> {
        let split = split(Path::new(path))?;
        Some((split.directory.to_str()?, split.name.to_str()?))
    }

    #[test]
    fn a_plain_path_is_split_at_its_last_component() {
        assert_eq!(parts("/run/netns/a"), Some(("/run/netns", "a")));
        assert_eq!(parts("/run//netns/a/"), Some(("/run//netns", "a")));
    }

    #[test]
    fn a_path_that_climbs_or_is_relative_is_none() {
        for bad in ["run/netns/a", "/run/netns/../x", "/run/netns/..", "/", ""] {
            assert_eq!(parts(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn only_ns_net_of_procfs_is_a_link_to_follow() {
        let is =
            |directory: &str, name: &str| is_procfs_netns(Path::new(directory), OsStr::new(name));
        assert!(is("/proc/7/ns", "net"));
        assert!(is("/proc/7/task/8/ns", "net"));
        assert!(!is("/proc/7/ns", "mnt"));
        assert!(!is("/proc/7/fd", "net"));
    }
}
