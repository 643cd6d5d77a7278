//! The minimum kernel version, and newer features that netconfig uses or avoids.

use std::fmt;

use nix::sys::utsname::uname;

/// Major and minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The first with SO_NETNS_COOKIE, which distinguishes a netns from a later one with the same inode.
pub const MIN_KERNEL: Version = Version(5, 14);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelVersionError {
    #[error(
        "this kernel is {release}; netconfig needs Linux {MIN_KERNEL} or later (SO_NETNS_COOKIE distinguishes a netns \
         from a later one with the same inode)"
    )]
    TooOld {
        /// The release from uname(2).
        release: String,
    },
    #[error(
        "cannot parse the kernel release {release:?}; netconfig needs Linux {MIN_KERNEL} or later"
    )]
    Unknown { release: String },
}

/// A feature newer than the minimum version.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    pub name: &'static str,
    pub since: Version,
    /// netconfig uses it where it exists.
    pub is_used: bool,
    /// For the table in README.md.
    pub fallback: &'static str,
    /// Occurs in the sources if and only if the feature is used.
    #[cfg(test)]
    source_marker: &'static str,
}

pub const FEATURES: [Feature; 6] = [
    Feature {
        name: "`net.ipv4.tcp_migrate_req`",
        since: Version(5, 14),
        is_used: true,
        fallback: "netconfig skips the sysctl: when a ztunnel stops, connections in its accept queue are reset.",
        #[cfg(test)]
        source_marker: "tcp_migrate_req",
    },
    Feature {
        name: "`IFA_PROTO` of an address",
        since: Version(5, 18),
        is_used: true,
        fallback: "`::6` on `lo` is recognized as inpod's by inpod's tables. If these are lost before a sidecar's \
                  redirection is removed, the address stays.",
        #[cfg(test)]
        source_marker: "push_proto(",
    },
    Feature {
        name: "nf_tables `destroy`",
        since: Version(6, 3),
        is_used: false,
        fallback: "netconfig reads what it deletes before, in the same generation of the tables, and reads it again \
                  after concurrent changes.",
        #[cfg(test)]
        source_marker: "op_destroy",
    },
    Feature {
        name: "`SO_PEERPIDFD`",
        since: Version(6, 5),
        is_used: true,
        fallback: "A caller is identified by the pid of `SO_PEERCRED`. If it ends before its cgroup is read, a \
                  process that reuses its pid could be taken for it.",
        #[cfg(test)]
        source_marker: "sockopt::PeerPidfd",
    },
    Feature {
        name: "nf_tables table flags `owner` and `persist`",
        since: Version(6, 9),
        is_used: false,
        fallback: "A process with NET_ADMIN in a pod can flush inpod's tables, which is reported as drift. An owner \
                  would need an open socket for each pod.",
        #[cfg(test)]
        source_marker: "TableFlags::",
    },
    Feature {
        name: "`ioctl(NS_GET_ID)` of a netns",
        since: Version(6, 18),
        is_used: false,
        fallback: "A socket that is opened in a netns returns its cookie (`SO_NETNS_COOKIE`), which is the same \
                  number.",
        #[cfg(test)]
        source_marker: "NS_GET_ID",
    },
];

/// Refuses a kernel below the minimum. Logs, at level debug, its newer features.
pub fn check() -> Result<Version, KernelVersionError> {
    let release = uname().map(|uname| uname.release().to_string_lossy().into_owned());
    let running = check_release(&release.unwrap_or_default())?;
    for feature in FEATURES {
        let Feature {
            name,
            since,
            is_used,
            ..
        } = feature;
        let is_there = since <= running;
        tracing::debug!(feature = name, %since, %running, is_there, is_used, "Kernel feature");
    }
    Ok(running)
}

fn check_release(release: &str) -> Result<Version, KernelVersionError> {
    let error = || release.to_owned();
    let version = parse(release).ok_or_else(|| KernelVersionError::Unknown { release: error() })?;
    if version < MIN_KERNEL {
        return Err(KernelVersionError::TooOld { release: error() });
    }
    Ok(version)
}

/// Parses `major.minor`, without what distributions append.
fn parse(release: &str) -> Option<Version> {
    let (major, rest) = release.split_once('.')?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    let minor = end.map_or(Some(rest), |end| rest.get(..end))?;
    Some(Version(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, fs, path::Path};

    use super::*;

    #[test]
    fn a_kernel_at_the_minimum_will_do_and_one_below_is_refused_by_its_name() {
        for (release, wanted) in [
            ("5.14.0", Version(5, 14)),
            ("5.14.0-362.8.1.el9_3.x86_64", Version(5, 14)),
            ("5.15-rc1", Version(5, 15)),
            ("6.1", Version(6, 1)),
            ("6.18.44-fc-v595", Version(6, 18)),
            ("10.0.1", Version(10, 0)),
        ] {
            assert_eq!(check_release(release), Ok(wanted), "{release}");
        }
        for release in ["5.13.19-generic", "5.4.0", "4.18.0-513.el8", "2.6.78"] {
            let error = check_release(release).unwrap_err();
            let release = release.to_owned();
            assert_eq!(
                error,
                KernelVersionError::TooOld {
                    release: release.clone()
                }
            );
            let text = error.to_string();
            assert!(
                text.contains(&release) && text.contains("5.14 or later"),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_version_is_refused_and_shown() {
        for release in ["", "6", "6.", "six.one", "6.x", "99999.1"] {
            let error = check_release(release).unwrap_err();
            assert!(
                matches!(error, KernelVersionError::Unknown { .. }),
                "{release}"
            );
            assert!(
                error.to_string().contains(&format!("{release:?}")),
                "{error}"
            );
        }
    }

    #[test]
    fn the_kernel_that_runs_the_tests_is_above_the_minimum() {
        assert!(check().unwrap() >= MIN_KERNEL);
    }

    fn page() -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
    }

    #[test]
    fn the_page_has_the_table_of_features() {
        let mut table = format!(
            "| Feature | Linux | Used | Without it |\n|---|---|---|---|\n\
             | `SO_NETNS_COOKIE` | {MIN_KERNEL} | yes | netconfig does not start. |\n"
        );
        for feature in FEATURES {
            let Feature {
                name,
                since,
                is_used,
                fallback,
                ..
            } = feature;
            let used = if is_used { "yes" } else { "no" };
            writeln!(table, "| {name} | {since} | {used} | {fallback} |").unwrap();
        }
        assert!(
            page().contains(&table),
            "put this into services/netconfig/README.md:\n{table}"
        );
    }

    /// Collects all but this file.
    fn sources(directory: &Path, found: &mut String) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.file_name().unwrap() != "kernel_version.rs" {
                *found += &fs::read_to_string(path).unwrap();
            }
        }
    }

    #[test]
    fn a_feature_is_used_in_the_sources_where_the_table_says_so() {
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut text = String::new();
        for part in ["src", "../lib/inpod-service/src", "../lib/inpod-linux/src"] {
            sources(&own.join(part), &mut text);
        }
        for Feature {
            name,
            is_used,
            source_marker,
            ..
        } in FEATURES
        {
            assert_eq!(text.contains(source_marker), is_used, "{name}");
        }
    }
}
