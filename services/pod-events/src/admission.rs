//! Limits concurrent ADDs, and orders the waiting ADDs by deadline.
//!
//! A permit covers an ADD's work on this node: claim and rules. The permit is released while the ADD waits for ztunnel,
//! so an unavailable ztunnel blocks no other ADD. DELs, reconciles and garbage collection need no permit.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_types::{Failure, Reason};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Issues permits, earliest deadline first. The type is cheap to clone.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Mutex<Queue>>);

/// An ADD's position in the queue. Only ADDs with an earlier deadline can overtake, and ever fewer as the own deadline
/// approaches, so no ADD starves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ticket {
    deadline: Instant,
    sequence: u64,
}

/// A bounded number of working ADDs, and the waiting ADDs. A cancelled ADD leaves from the middle of the queue.
#[derive(Debug)]
struct Queue {
    max: NonZeroUsize,
    working: usize,
    waiting: BTreeMap<Ticket, oneshot::Sender<()>>,
    issued: u64,
}

impl Queue {
    fn start_next(&mut self) {
        match self.waiting.pop_first() {
            // A waiter that is gone passes its permit on when dropped.
            Some((_, next)) => next.send(()).unwrap_or_default(),
            None => self.working = self.working.saturating_sub(1),
        }
    }

    fn refusal(&self, ticket: Ticket) -> Failure {
        let ahead = self.working + self.waiting.range(..ticket).count();
        let message = format!("{ahead} ADDs were ahead until the caller's time was over");
        Failure::new(Reason::Overloaded, message).retry_after(RETRY_AFTER)
    }
}

impl Admission {
    pub fn new(max: NonZeroUsize) -> Self {
        Self(Arc::new(Mutex::new(Queue {
            max,
            working: 0,
            waiting: BTreeMap::new(),
            issued: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    pub fn working(&self) -> usize {
        self.lock().working
    }

    /// Waits for a permit, for an ADD whose work must begin before `until`. Dropping the future removes the ADD from
    /// the queue.
    ///
    /// # Errors
    ///
    /// OVERLOADED at `until`.
    pub async fn acquire(&self, until: Instant) -> Result<Permit, Failure> {
        let ticket = {
            let mut queue = self.lock();
            queue.issued += 1;
            Ticket {
                deadline: until,
                sequence: queue.issued,
            }
        };
        self.wait(ticket).await?;
        Ok(Permit {
            admission: self.clone(),
            ticket,
            is_held: true,
        })
    }

    async fn wait(&self, ticket: Ticket) -> Result<(), Failure> {
        let called = {
            let mut queue = self.lock();
            if queue.working < queue.max.get() {
                queue.working += 1;
                return Ok(());
            }
            let (call, called) = oneshot::channel();
            queue.waiting.insert(ticket, call);
            called
        };
        let mut waiting = Waiting {
            admission: self,
            ticket: Some(ticket),
        };
        // The sender stays in the queue as long as the ticket.
        if let Ok(Ok(())) = timeout_at(ticket.deadline, called).await {
            waiting.ticket = None;
            return Ok(());
        }
        let refused = self.lock().refusal(ticket);
        Err(refused)
    }
}

/// A waiting ADD. When dropped, the ADD leaves the queue or passes on a permit that was just granted.
struct Waiting<'a> {
    admission: &'a Admission,
    ticket: Option<Ticket>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else {
            return;
        };
        let mut queue = self.admission.lock();
        if queue.waiting.remove(&ticket).is_none() {
            queue.start_next();
        }
    }
}

#[derive(Debug)]
pub struct Permit {
    admission: Admission,
    ticket: Ticket,
    is_held: bool,
}

impl Permit {
    pub fn release(&mut self) {
        if std::mem::take(&mut self.is_held) {
            self.admission.lock().start_next();
        }
    }

    /// Takes a slot again, queueing with the original ticket.
    ///
    /// # Errors
    ///
    /// OVERLOADED if no slot is free in time.
    pub async fn reacquire(&mut self) -> Result<(), Failure> {
        if !self.is_held {
            self.admission.wait(self.ticket).await?;
            self.is_held = true;
        }
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests;
