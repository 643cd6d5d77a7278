//! A ztunnel like stock's on ZDS that opens nothing and withholds a chosen acknowledgement, so that
//! the agent waits there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{TIMEOUT, eventually};
use tokio::{sync::Notify, time::sleep};
use zds_client::{Client, Received};

const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The message whose acknowledgement is withheld.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The Add with this number, from 1.
    Add(usize),
    AddOf(String),
    /// The Del of that pod.
    DelOf(String),
    SnapshotSent,
}

/// Device and inode of each pod's netns.
pub(crate) type Served = BTreeMap<String, (u64, u64)>;

/// The scripted ztunnel, stopped on drop.
pub(crate) struct Scripted(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    renew: Notify,
    end: Notify,
}

#[derive(Default)]
struct State {
    hold: Option<Hold>,
    held: bool,
    account: Served,
    live: bool,
}

impl Scripted {
    /// Reconnects whenever the agent closes the connection.
    pub(crate) fn start(socket: &Path) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no runtime")?;
        let shared = Arc::new(Shared::default());
        let (socket, served) = (socket.to_owned(), Arc::clone(&shared));
        thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = sessions(&socket, &served) => {}
                    () = served.end.notified() => {}
                }
            });
        });
        Ok(Self(shared))
    }

    /// A withheld acknowledgement is lost with its connection.
    pub(crate) fn hold(&self, hold: Hold) {
        let mut state = self.0.lock();
        (state.hold, state.held) = (Some(hold), false);
    }

    /// Closes the connection to get a new snapshot.
    pub(crate) fn reconnect(&self) {
        self.0.renew.notify_one();
    }

    pub(crate) fn until_held(&self) -> anyhow::Result<()> {
        eventually("the agent has come to the point", TIMEOUT, || {
            ensure!(self.0.lock().held, "it has not");
            anyhow::Ok(())
        })
    }

    /// None while its snapshot is incomplete.
    pub(crate) fn served(&self) -> anyhow::Result<Served> {
        let state = self.0.lock();
        ensure!(state.live, "its snapshot is not complete");
        Ok(state.account.clone())
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.0.end.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sessions(socket: &PathBuf, shared: &Shared) {
    loop {
        match Client::connect(socket).await {
            Ok(client) => session(client, shared).await.unwrap_or_default(),
            Err(_) => sleep(RETRY_INTERVAL).await,
        }
        let mut state = shared.lock();
        state.live = false;
        if state.held {
            (state.hold, state.held) = (None, false);
        }
    }
}

async fn session(mut client: Client, shared: &Shared) -> anyhow::Result<()> {
    let (mut named, mut adds) = (BTreeSet::new(), 0);
    loop {
        let received = tokio::select! {
            received = client.recv() => received?,
            () = shared.renew.notified() => return Ok(()),
        };
        let Some(request) = received else {
            return Ok(());
        };
        adds += usize::from(matches!(request, Received::Add { .. }));
        let point = point(&request, adds);
        let withheld = {
            let mut state = shared.lock();
            state.held = state.held || state.hold.as_ref().is_some_and(|it| point.contains(it));
            state.held
        };
        if !withheld {
            shared.lock().carry_out(request, &mut named)?;
            client.ack(Ok(())).await?;
        }
    }
}

fn point(request: &Received, adds: usize) -> Vec<Hold> {
    match request {
        Received::Add { uid, .. } => vec![Hold::Add(adds), Hold::AddOf(uid.clone())],
        Received::Del { uid } => vec![Hold::DelOf(uid.clone())],
        Received::SnapshotSent => vec![Hold::SnapshotSent],
        Received::Keep { .. } => Vec::new(),
    }
}

impl State {
    fn carry_out(&mut self, request: Received, named: &mut BTreeSet<String>) -> anyhow::Result<()> {
        match request {
            Received::Add { uid, netns, .. } => {
                named.insert(uid.clone());
                self.account.insert(uid, identity(netns)?);
            }
            Received::Keep { uid } => {
                named.insert(uid);
            }
            Received::Del { uid } => {
                named.remove(&uid);
                if self.live {
                    self.account.remove(&uid);
                }
            }
            Received::SnapshotSent => {
                self.account.retain(|uid, _| named.contains(uid));
                self.live = true;
            }
        }
        Ok(())
    }
}

fn identity(netns: OwnedFd) -> anyhow::Result<(u64, u64)> {
    let metadata = File::from(netns).metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}
