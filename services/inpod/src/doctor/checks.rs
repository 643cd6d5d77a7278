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

/// Runs every check. Checks of causes precede checks of their consequences.
pub(crate) fn run(facts: &Facts) -> Vec<Check> {
    let parts = [kernel::checks, chain::checks, mesh::zds, state::checks];
    let of_files = parts.iter().flat_map(|part| part(facts));
    let of_services = run_services(facts).into_iter();
    of_files
        .chain(of_services)
        .chain([mesh::self_test(facts)])
        .collect()
}

/// Leaves out checks of the node's files, which a container of inpod does not see, and the self-test, which netconfig
/// refuses to the container.
pub(crate) fn run_services(facts: &Facts) -> Vec<Check> {
    let parts = [services::checks, mesh::checks, limits::checks];
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
