//! Detects the use of iptables' legacy tables, which no netlink interface reads.

use std::fs;

/// Tables in use in the reading thread's netns, one name per line; absent before the first use (ip_tables.c and
/// ip6_tables.c). A program that only lists a table also puts the table into use.
const NAMES: [&str; 2] = [
    "/proc/thread-self/net/ip_tables_names",
    "/proc/thread-self/net/ip6_tables_names",
];

/// Returns whether the table nat is in use in the calling thread's netns, for any family.
pub(crate) fn uses_nat() -> bool {
    NAMES.iter().any(|path| {
        let names = fs::read_to_string(path);
        names.is_ok_and(|names| names.lines().any(|name| name == "nat"))
    })
}
