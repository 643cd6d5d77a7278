//! Refuses to run on a kernel below the minimum version.

use std::fmt;

use nix::sys::utsname::uname;

/// The major and the minor version of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The first version with SO_NETNS_COOKIE, which distinguishes a netns from a later netns with the same inode.
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

/// Refuses a kernel below the minimum.
pub fn check() -> Result<Version, KernelVersionError> {
    let release = uname().map(|uname| uname.release().to_string_lossy().into_owned());
    check_release(&release.unwrap_or_default())
}

fn check_release(release: &str) -> Result<Version, KernelVersionError> {
    let error = || release.to_owned();
    let version = parse(release).ok_or_else(|| KernelVersionError::Unknown { release: error() })?;
    if version < MIN_KERNEL {
        return Err(KernelVersionError::TooOld { release: error() });
    }
    Ok(version)
}

/// Parses `major.minor`, and ignores the suffix that distributions append.
fn parse(release: &str) -> Option<Version> {
    let (major, rest) = release.split_once('.')?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    let minor = end.map_or(Some(rest), |end| rest.get(..end))?;
    Some(Version(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
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
}
