//! Aborts the process if a task panics on which the whole process depends.
//!
//! tokio confines a panic to the panicking task. Without the task that watches the API server or syncs other services,
//! the process would stay ready and live without doing this work. An abort is safe, because the restarted process
//! continues from its persisted state.

use std::{panic::AssertUnwindSafe, process};

use futures_util::FutureExt as _;

/// Runs a task that may end normally, but whose panic aborts the process.
pub async fn abort_on_panic(part: &'static str, work: impl Future<Output = ()>) {
    // After a panic, no state of the task is used again.
    if AssertUnwindSafe(work).catch_unwind().await.is_err() {
        tracing::error!(part, "A core task panicked; aborting the process");
        process::abort();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::ExitStatusExt as _,
        process::{Command, ExitStatus},
    };

    use super::*;

    /// Runs one of the tests below in a process of its own.
    fn process_that_does(what: &str) -> ExitStatus {
        let mut process = Command::new(std::env::current_exe().unwrap());
        let what = format!("supervised_task::tests::{what}");
        process.args(["--exact", &what, "--ignored"]);
        process.status().unwrap()
    }

    #[test]
    fn a_part_that_panics_takes_its_process_with_it() {
        let status = process_that_does("panic_in_a_part");
        assert_eq!(status.signal(), Some(nix::libc::SIGABRT), "{status}");
    }

    #[test]
    fn a_part_that_is_done_lets_its_process_go_on() {
        let status = process_that_does("be_done_with_a_part");
        assert!(status.success(), "{status}");
    }

    /// Runs the work in a task and drops the result, like all callers.
    async fn run(work: impl Future<Output = ()> + Send + 'static) {
        let _ended = tokio::spawn(abort_on_panic("a part", work)).await;
    }

    #[tokio::test]
    #[ignore = "what a process of its own does"]
    async fn panic_in_a_part() {
        run(async { panic!("a defect") }).await;
    }

    #[tokio::test]
    #[ignore = "what a process of its own does"]
    async fn be_done_with_a_part() {
        run(async {}).await;
    }
}
