//! The program's start on an old kernel.

use std::process::Command;

/// setarch(8) makes the kernel report 2.6 to a process and its children.
#[test]
fn on_a_kernel_below_the_minimum_netconfig_does_not_start_and_names_both() {
    let run_dir = tempfile::tempdir().unwrap();
    let output = Command::new("setarch")
        .args(["--uname-2.6", env!("CARGO_BIN_EXE_netconfig")])
        .env("INPOD_RUN_DIR", run_dir.path())
        .env("INPOD_PEER", "uid")
        .output()
        .expect("setarch is missing: install util-linux");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{stderr}");
    assert!(
        stderr.contains("netconfig: this kernel is 2.6."),
        "{stderr}"
    );
    assert!(stderr.contains("needs Linux 5.14 or later"), "{stderr}");
    assert!(!run_dir.path().join("netconfig/grpc.sock").exists());
}
