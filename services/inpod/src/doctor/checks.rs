//! Pure functions that turn facts into the results of checks.

mod chain;
mod kernel;
mod limits;
mod mesh;
mod services;
mod state;

use super::{
    check::Check,
    facts::{Facts, Inode, Kind},
};

/// Runs all checks. The checks of causes come before the checks of their consequences.
pub(crate) fn run(facts: &Facts) -> Vec<Check> {
    let parts: [fn(&Facts) -> Vec<Check>; 6] = [
        kernel::checks,
        chain::checks,
        services::checks,
        mesh::checks,
        limits::checks,
        state::checks,
    ];
    parts.iter().flat_map(|part| part(facts)).collect()
}

/// Describes a wrong file type, or permissions beyond `mode`; returns `None` if type and permissions are right.
fn openness(inode: Inode, kind: Kind, mode: u32) -> Option<String> {
    let Inode {
        mode: found,
        uid,
        kind: is,
    } = inode;
    if is != kind {
        return Some(format!("it is not a {}", kind_name(kind)));
    }
    let extra = found & !mode & 0o777;
    (extra != 0).then(|| format!("mode {found:04o}, owner {uid} (expected: {mode:04o})"))
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Directory => "directory",
        Kind::Socket => "socket",
        Kind::File => "file",
        Kind::Other => "file of another type",
    }
}

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;
