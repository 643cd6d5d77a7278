//! Through which sockets each claimed netns is heard.
//!
//! Two sockets in this process's own netns hear all of them, each by its number. Where the kernel refuses that (it
//! takes CAP_NET_BROADCAST), two more are opened in each claimed netns. These keep it alive (services/docs/facts/kernel.md, 7), as
//! the claim itself does, and are closed with the claim.

use std::{collections::BTreeMap, io, sync::Arc};

use inpod_types::{NetnsId, SandboxRef, with_causes};
use tokio::task::spawn_blocking;

use super::{
    Queue,
    hearer::{Hearer, Listening, Numbers, Whose, start},
    number::number_of,
    socket::{Subject, Unpolled},
};
use crate::{claims::Claim, metrics::DriftMetrics};

/// For a socket in a claimed netns. It hears of that netns alone, and there are two for each.
const OWN_ROOM: usize = 256 * 1024;

/// How it is listened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Whether two sockets may hear all claimed netns; `false` does as if the kernel refused.
    pub(crate) shared: bool,
    /// How many bytes the kernel keeps for a shared socket before it drops (SO_RCVBUF, which counts twice what is
    /// asked for, and its own overhead with it).
    pub(crate) room: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ears {
    options: Options,
    queue: Arc<Queue>,
    counts: DriftMetrics,
    shared: Result<Shared, String>,
    open: BTreeMap<SandboxRef, Ear>,
}

/// Two sockets, and whose the numbers are.
#[derive(Debug)]
struct Shared {
    numbers: Arc<Numbers>,
    _listening: Vec<Listening>,
}

/// How one claimed netns is heard.
#[derive(Debug)]
struct Ear {
    netns: NetnsId,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Shared(i32),
    Own { _listening: Vec<Listening> },
}

impl Ears {
    /// Opens the shared sockets. To be called in a task, on a thread in the netns from which the claimed ones are
    /// heard.
    pub(crate) fn open(options: Options, queue: Arc<Queue>, counts: DriftMetrics) -> Self {
        let shared = if options.shared {
            Shared::open(options.room, &queue, &counts).map_err(|error| error.to_string())
        } else {
            Err("switched off".to_owned())
        };
        Self {
            options,
            queue,
            counts,
            shared,
            open: BTreeMap::new(),
        }
    }

    /// Whether two sockets hear all claimed netns; else why not.
    pub(crate) fn are_shared(&self) -> Result<(), String> {
        match &self.shared {
            Ok(_) => Ok(()),
            Err(why) => Err(format!(
                "sockets in each claimed netns are used instead of shared ones, which take CAP_NET_BROADCAST: {why}"
            )),
        }
    }

    /// Hears a claimed netns from now on, if it did not yet. Whether it does.
    pub(crate) async fn listen_to(&mut self, claim: &Arc<Claim>) -> bool {
        let netns = claim.netns.id();
        let known = self.open.get(&claim.sandbox);
        if known.is_some_and(|ear| ear.netns == netns) {
            return true;
        }
        // First: the kernel may give the number of its last netns to this one.
        if let Some(before) = self.open.remove(&claim.sandbox) {
            self.close(&claim.sandbox, &before.way);
        }
        let Some(way) = self.way_to(claim).await else {
            return false;
        };
        self.open.insert(claim.sandbox.clone(), Ear { netns, way });
        true
    }

    /// Does not hear the netns of an ended claim any more.
    pub(crate) fn forget(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        if self.open.get(sandbox).is_some_and(|ear| ear.netns == netns)
            && let Some(ear) = self.open.remove(sandbox)
        {
            self.close(sandbox, &ear.way);
        }
    }

    fn close(&self, sandbox: &SandboxRef, way: &Way) {
        if let (Way::Shared(number), Ok(shared)) = (way, &self.shared) {
            shared.numbers.free(*number, sandbox);
        }
    }

    async fn way_to(&self, claim: &Arc<Claim>) -> Option<Way> {
        if let Ok(shared) = &self.shared {
            match number(claim).await {
                Ok(number) => {
                    shared.numbers.give(number, claim.sandbox.clone());
                    return Some(Way::Shared(number));
                }
                Err(error) => {
                    tracing::warn!(sandbox = %claim.sandbox, error, "A netns gets sockets of its own");
                }
            }
        }
        match self.own(claim).await {
            Ok(_listening) => Some(Way::Own { _listening }),
            Err(error) => {
                tracing::warn!(sandbox = %claim.sandbox, error, "Changes in a netns are not heard");
                None
            }
        }
    }

    async fn own(&self, claim: &Arc<Claim>) -> Result<Vec<Listening>, String> {
        let (opened, room) = (Arc::clone(claim), self.options.room.min(OWN_ROOM));
        let sockets = spawn_blocking(move || {
            let sockets = opened.netns.within(|| sockets(room, false));
            sockets.map_err(|error| with_causes(&error))
        });
        let sockets = sockets.await.map_err(|error| error.to_string())??;
        let hearer = || Hearer {
            whose: Whose::One(claim.sandbox.clone()),
            queue: Arc::clone(&self.queue),
            counts: self.counts.clone(),
        };
        start(sockets, hearer).map_err(|error| error.to_string())
    }
}

impl Shared {
    fn open(room: usize, queue: &Arc<Queue>, counts: &DriftMetrics) -> io::Result<Self> {
        let numbers = Arc::<Numbers>::default();
        let hearer = || Hearer {
            whose: Whose::Numbered(Arc::clone(&numbers)),
            queue: Arc::clone(queue),
            counts: counts.clone(),
        };
        let listening = start(sockets(room, true), hearer)?;
        Ok(Self {
            numbers,
            _listening: listening,
        })
    }
}

async fn number(claim: &Arc<Claim>) -> Result<i32, String> {
    let claim = Arc::clone(claim);
    let number = spawn_blocking(move || number_of(&claim.netns)).await;
    let number = number.map_err(|error| error.to_string())?;
    number.map_err(|error| with_causes(&error))
}

/// One for each subject.
fn sockets(room: usize, all_numbers: bool) -> io::Result<Vec<Unpolled>> {
    let open = |subject| Unpolled::open(subject, room, all_numbers);
    Subject::ALL.into_iter().map(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shared_sockets_that_are_masked_are_not_used_and_it_is_said_why() {
        let options = Options {
            shared: false,
            room: 4096,
        };
        let queue = Arc::new(Queue::new(std::time::Duration::from_secs(1)));
        let ears = Ears::open(options, queue, DriftMetrics::default());
        let why = ears.are_shared().unwrap_err();
        assert!(why.ends_with("switched off"), "{why}");
    }
}
