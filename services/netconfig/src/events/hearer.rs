//! A task for each socket, which takes what the kernel tells and has read what that is about.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_types::SandboxRef;
use tokio::task::JoinHandle;

use super::{
    Queue, RETRY,
    socket::{Heard, Socket, Unpolled},
};
use crate::metrics::DriftMetrics;

/// How many messages are taken before others get their turn on the thread.
const AT_ONCE: usize = 64;

/// Starts a task for each socket.
pub(super) fn start(
    sockets: io::Result<Vec<Unpolled>>,
    hearer: impl Fn() -> Hearer,
) -> io::Result<Vec<Listening>> {
    let listening = |socket: Unpolled| {
        let task = hearer().listen(socket.polled()?);
        Ok(Listening(tokio::spawn(inpod_service::vital(
            "hearer", task,
        ))))
    };
    sockets?.into_iter().map(listening).collect()
}

/// A task that ends, and closes its socket, when this is dropped.
#[derive(Debug)]
pub(super) struct Listening(JoinHandle<()>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Which claimed netns has which number. One that is not in it belongs to no claim: the node has other netns, and a
/// number lasts longer than the claim that it was given for.
#[derive(Debug, Default)]
pub(super) struct Numbers(Mutex<BTreeMap<i32, SandboxRef>>);

impl Numbers {
    pub(super) fn give(&self, number: i32, sandbox: SandboxRef) {
        self.lock().insert(number, sandbox);
    }

    /// Unless another claim has it by now.
    pub(super) fn free(&self, number: i32, sandbox: &SandboxRef) {
        let mut numbers = self.lock();
        if numbers.get(&number) == Some(sandbox) {
            numbers.remove(&number);
        }
    }

    fn get(&self, number: i32) -> Option<SandboxRef> {
        self.lock().get(&number).cloned()
    }

    /// A panic while it was held cannot have left it half changed: every change is one call of the map.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, SandboxRef>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a socket hears is about.
#[derive(Debug)]
pub(super) enum Whose {
    One(SandboxRef),
    Numbered(Arc<Numbers>),
}

#[derive(Debug)]
pub(super) struct Hearer {
    pub(super) whose: Whose,
    pub(super) queue: Arc<Queue>,
    pub(super) counts: DriftMetrics,
}

impl Hearer {
    async fn listen(self, socket: Socket) {
        loop {
            if let Err(error) = self.hear_all(&socket).await {
                // A runtime that ends, or a kernel without memory.
                tracing::error!(%error, "Cannot listen to changes in netns");
                self.lost();
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    /// Takes all that is there, and waits for more.
    ///
    /// The kernel tells once that it drops, and goes on dropping until everything was taken (netlink_overrun and
    /// netlink_rcv_wake in net/netlink/af_netlink.c): what is read before that may be read too early, and is read
    /// again. It is read before that as well, because more may come for ever.
    async fn hear_all(&self, socket: &Socket) -> io::Result<()> {
        let mut has_lost = false;
        for count in 1_usize.. {
            match socket.take()? {
                Heard::Change(number) => self.change(number),
                Heard::Overrun => {
                    has_lost = true;
                    self.counts.overrun();
                    self.lost();
                }
                Heard::Nothing => break,
            }
            if count.is_multiple_of(AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
        if has_lost {
            self.lost();
        }
        socket.ready().await
    }

    fn change(&self, number: Option<i32>) {
        let claimed = match &self.whose {
            Whose::One(sandbox) => Some(sandbox.clone()),
            Whose::Numbered(numbers) => number.and_then(|number| numbers.get(number)),
        };
        self.counts.event(claimed.is_some());
        if let Some(sandbox) = claimed {
            self.queue.mark(&sandbox);
        }
    }

    fn lost(&self) {
        match &self.whose {
            Whose::One(sandbox) => self.queue.mark(sandbox),
            Whose::Numbered(_) => self.queue.mark_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(name: &str) -> SandboxRef {
        SandboxRef {
            network_name: "net".parse().unwrap(),
            container_id: name.parse().unwrap(),
            ifname: "eth0".parse().unwrap(),
        }
    }

    #[test]
    fn a_number_that_another_claim_got_is_not_freed_with_the_claim_that_had_it() {
        let numbers = Numbers::default();
        numbers.give(3, sandbox("old"));
        numbers.give(3, sandbox("new"));
        numbers.free(3, &sandbox("old"));
        assert_eq!(numbers.get(3), Some(sandbox("new")));
        numbers.free(3, &sandbox("new"));
        assert_eq!(numbers.get(3), None);
    }
}
