//! What a process cannot do without: a part that goes on for as long as the process does.
//!
//! tokio keeps a panic to the task that it happened in. Where that was the part that follows the API server, or tells
//! the other services what they missed, the process would go on as ready and alive, and never do that part again. So
//! it ends, is started again, and takes up what it finds: losing the process loses nothing, losing a part of it does.

use std::{panic::AssertUnwindSafe, process};

use futures_util::FutureExt as _;

/// A part's work. One that is done may end; one that panics takes the process with it.
pub async fn abort_on_panic(part: &'static str, work: impl Future<Output = ()>) {
    // Nothing of the part is looked at after its end.
    if AssertUnwindSafe(work).catch_unwind().await.is_err() {
        tracing::error!(
            part,
            "A part of this process has ended by a defect; the process ends, to be started again"
        );
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

    /// How a process of its own ends in which this is done.
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

    /// As everywhere: nobody looks how the task has ended.
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
