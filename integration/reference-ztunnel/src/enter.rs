//! Enters the network namespaces of pods; no other module does.
//!
//! A socket stays in the netns of the thread that created it. For each pod, a thread inside the netns therefore creates
//! the sockets, while the runtime's thread, which uses the sockets, stays outside.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, mpsc};
use std::thread;

use nix::sched::CloneFlags;
use serde::Serialize;
use tokio::sync::oneshot;

/// The identity by which ztunnel compares network namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct NetnsId {
    dev: u64,
    ino: u64,
}

/// The descriptor that the agent sent. Only entering shows whether the descriptor is a network namespace.
#[derive(Debug, Clone)]
pub(crate) struct Netns {
    id: NetnsId,
    file: Arc<File>,
}

impl Netns {
    /// Reads the identity of the netns and checks nothing else, like stock ztunnel.
    pub(crate) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let file = File::from(descriptor);
        let metadata = file.metadata()?;
        let id = NetnsId {
            dev: metadata.dev(),
            ino: metadata.ino(),
        };
        let file = Arc::new(file);
        Ok(Self { id, file })
    }

    pub(crate) const fn id(&self) -> NetnsId {
        self.id
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread inside a netns that runs jobs. The thread ends and releases the netns with its last handle.
#[derive(Debug, Clone)]
pub(crate) struct Inside(mpsc::Sender<Job>);

impl Inside {
    /// Starts the thread, and returns once the thread is inside.
    pub(crate) async fn enter(netns: Netns) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (entered, outcome) = oneshot::channel();
        in_netns(netns, move |result| {
            let inside = result.is_ok();
            // If there is no receiver, the session has ended and the queue is closed.
            drop(entered.send(result));
            if inside {
                queue.into_iter().for_each(|job| job());
            }
        })?;
        outcome.await.map_err(|_| gone())??;
        Ok(Self(jobs))
    }

    pub(crate) async fn run<T, F>(&self, job: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> io::Result<T> + Send + 'static,
    {
        let (done, outcome) = oneshot::channel();
        // The send fails if the caller was cancelled.
        let job: Job = Box::new(move || drop(done.send(job())));
        self.0.send(job).map_err(|_| gone())?;
        outcome.await.map_err(|_| gone())?
    }
}

fn gone() -> io::Error {
    io::Error::other("the netns's thread ended")
}

/// Runs `body` on a new thread with the result of entering `netns`. The thread ends with `body` and never returns to a
/// pool, so its namespace need not be restored.
fn in_netns<F>(netns: Netns, body: F) -> io::Result<()>
where
    F: FnOnce(io::Result<()>) + Send + 'static,
{
    let thread = thread::Builder::new().name("netns".to_owned());
    thread.spawn(move || body(enter(netns))).map(drop)
}

/// Moves the thread into the netns and closes the descriptor, because the thread itself keeps the netns alive.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the descriptor is closed once the thread is inside"
)]
#[expect(
    clippy::disallowed_methods,
    reason = "called on a thread that was made for it, until the crate netns can be used here"
)]
fn enter(netns: Netns) -> io::Result<()> {
    nix::sched::setns(&netns.file, CloneFlags::CLONE_NEWNET)?;
    Ok(())
}
