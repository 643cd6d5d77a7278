//! Refused changes leave nothing behind.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use inpod_types::Reason;

use crate::apply::everything;
use crate::support::{Fresh, ambient, plain, sandbox};

/// Another process owns the table. Earlier additions are removed.
#[test]
fn a_refused_transaction_takes_routes_and_rules_back() {
    let fresh = Fresh::new();
    let mut nft = Command::new("nft");
    nft.arg("-i").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut owner = fresh.run(move || nft.spawn()).unwrap();
    let script = b"add table inet inpod-nat { flags owner; }\n";
    owner.stdin.as_mut().unwrap().write_all(script).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !fresh.nft("list ruleset").contains("owner") {
        assert!(Instant::now() < deadline, "nft did not make its table");
    }
    let before = everything(&fresh);
    let error = plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap_err();
    assert_eq!(error.reason, Reason::KernelRefused);
    assert_eq!(error.undo_failures, [""; 0]);
    assert_eq!(everything(&fresh), before);
    owner.kill().unwrap();
    owner.wait().unwrap();
}
