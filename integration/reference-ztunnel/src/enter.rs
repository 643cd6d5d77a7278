//! The one door into a pod's network namespace.
//!
//! A socket belongs to the netns of the thread that made it, for ever. So each pod has a thread
//! that lives inside and makes sockets, while the runtime's thread, which uses them, stays
//! outside.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, mpsc};
use std::thread;

use nix::sched::CloneFlags;
use serde::Serialize;
use tokio::sync::oneshot;

/// What makes two descriptors the same netns for ztunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct NetnsId {
    dev: u64,
    ino: u64,
}

/// A netns as it was handed over. Whether it is one shows when somebody enters it.
#[derive(Debug, Clone)]
pub(crate) struct Netns {
    id: NetnsId,
    file: Arc<File>,
}

impl Netns {
    /// Looks at the descriptor's identity, and at nothing else: neither does the stock ztunnel.
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

/// A thread that lives in a netns and runs what it is given. It ends with its last handle, and
/// with it the hold on the netns.
#[derive(Debug, Clone)]
pub(crate) struct Inside(mpsc::Sender<Job>);

impl Inside {
    /// Starts the thread and waits until it is inside.
    pub(crate) async fn enter(netns: Netns) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (entered, outcome) = oneshot::channel();
        in_netns(netns, move |result| {
            let inside = result.is_ok();
            // Nobody waits any more if the session ended: then the queue is closed, too.
            drop(entered.send(result));
            if inside {
                queue.into_iter().for_each(|job| job());
            }
        })?;
        outcome.await.map_err(|_| gone())??;
        Ok(Self(jobs))
    }

    /// Runs `job` inside and returns what it returned.
    pub(crate) async fn run<T, F>(&self, job: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> io::Result<T> + Send + 'static,
    {
        let (done, outcome) = oneshot::channel();
        // A caller that went away wants no result.
        let job: Job = Box::new(move || drop(done.send(job())));
        self.0.send(job).map_err(|_| gone())?;
        outcome.await.map_err(|_| gone())?
    }
}

fn gone() -> io::Error {
    io::Error::other("the netns's thread ended")
}

/// Runs `body` on a new thread, told whether that thread has entered `netns`. The thread ends
/// with `body`: one that changed namespace never goes back to a pool, so there is nothing to
/// restore.
fn in_netns<F>(netns: Netns, body: F) -> io::Result<()>
where
    F: FnOnce(io::Result<()>) + Send + 'static,
{
    let thread = thread::Builder::new().name("netns".to_owned());
    thread.spawn(move || body(enter(netns))).map(drop)
}

/// Enters, and lets go of the descriptor: from here on the thread itself holds the netns.
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
