//! Limits concurrent ADDs, and orders the others by deadline.
//!
//! A permit covers an ADD's work on this node: claim and rules. It is released while the ADD waits for ztunnel, so an
//! unavailable ztunnel blocks no other ADD. DELs, reconciles and garbage collection need no permit.

mod queue;

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_types::{Failure, Reason};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use queue::{Queue, Ticket};

/// Lower bound of the `retry_after` of a refused ADD.
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);

/// An ADD is refused at once only if it would be late even with the queue this many times faster than its mean
/// duration suggests: some ADDs ahead leave, and the first of a burst are the slowest.
const ESTIMATE_TOLERANCE: u32 = 4;

/// Issues permits, earliest deadline first. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    queue: Queue,
    waiters: HashMap<Ticket, oneshot::Sender<()>>,
}

impl State {
    fn start_next(&mut self) {
        let next = self
            .queue
            .finish()
            .and_then(|ticket| self.waiters.remove(&ticket));
        if let Some(next) = next {
            // A waiter that is gone passes its permit on when it is dropped.
            next.send(()).unwrap_or_default();
        }
    }
}

impl Admission {
    pub fn new(max: NonZeroUsize) -> Self {
        let state = State {
            queue: Queue::new(max),
            waiters: HashMap::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn waiting(&self) -> usize {
        self.lock().queue.waiting()
    }

    pub fn working(&self) -> usize {
        self.lock().queue.working()
    }

    /// Waits for a permit, for an ADD whose work must begin before `until`. Dropping the future leaves the queue.
    ///
    /// # Errors
    ///
    /// OVERLOADED: at once if the estimated wait is far longer than until `until`; otherwise at `until`.
    pub async fn acquire(&self, until: Instant) -> Result<Permit, Failure> {
        let ticket = {
            let mut state = self.lock();
            let ticket = state.queue.issue_ticket(until);
            if Instant::now() + state.queue.estimated_wait(ticket) / ESTIMATE_TOLERANCE >= until {
                return Err(refusal(&state.queue, ticket));
            }
            ticket
        };
        self.wait(ticket).await?;
        Ok(Permit {
            admission: self.clone(),
            ticket,
            worked: Duration::ZERO,
            since: Some(Instant::now()),
        })
    }

    async fn wait(&self, ticket: Ticket) -> Result<(), Failure> {
        let called = {
            let mut state = self.lock();
            if state.queue.start_or_enqueue(ticket) {
                return Ok(());
            }
            let (call, called) = oneshot::channel();
            state.waiters.insert(ticket, call);
            called
        };
        let mut waiting = Waiting {
            admission: self,
            ticket: Some(ticket),
        };
        // The sender stays in `waiters` as long as the ticket is queued.
        if let Ok(Ok(())) = timeout_at(ticket.deadline, called).await {
            waiting.ticket = None;
            return Ok(());
        }
        let refused = refusal(&self.lock().queue, ticket);
        Err(refused)
    }
}

fn refusal(queue: &Queue, ticket: Ticket) -> Failure {
    let (ahead, wait) = (queue.ahead(ticket), queue.estimated_wait(ticket));
    let message = format!(
        "{ahead} ADDs are ahead, about {:.1} s of work: more than the time that the caller has left",
        wait.as_secs_f32()
    );
    Failure::new(Reason::Overloaded, message).retry_after(wait.max(MIN_RETRY_AFTER))
}

/// A waiting ADD. When dropped, it leaves the queue or passes on a permit just granted.
struct Waiting<'a> {
    admission: &'a Admission,
    ticket: Option<Ticket>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else {
            return;
        };
        let mut state = self.admission.lock();
        if state.queue.remove(ticket) {
            state.waiters.remove(&ticket);
        } else {
            state.start_next();
        }
    }
}

#[derive(Debug)]
pub struct Permit {
    admission: Admission,
    ticket: Ticket,
    worked: Duration,
    since: Option<Instant>,
}

impl Permit {
    pub fn release(&mut self) {
        if let Some(since) = self.since.take() {
            self.worked += since.elapsed();
            self.admission.lock().start_next();
        }
    }

    /// Takes a slot again, queueing with the original ticket.
    ///
    /// # Errors
    ///
    /// OVERLOADED if no slot is free in time.
    pub async fn reacquire(&mut self) -> Result<(), Failure> {
        if self.since.is_none() {
            self.admission.wait(self.ticket).await?;
            self.since = Some(Instant::now());
        }
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.release();
        self.admission.lock().queue.record_duration(self.worked);
    }
}

#[cfg(test)]
mod tests;
