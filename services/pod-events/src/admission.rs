//! How many ADDs are worked on at once, and in which order the others wait.
//!
//! A turn covers the work of an ADD on this node: the claim, and the rules. It is laid down while the ADD waits for a
//! ztunnel, so that ADDs whose ztunnel is away hold up nobody, and a node whose ztunnel comes back works on the most
//! urgent ones first. Whoever ends a sandbox, looks or cleans up needs no turn.

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

use queue::{Place, Queue};

/// The least that a caller is told to wait who was refused.
const COME_BACK: Duration = Duration::from_secs(1);

/// Refused at once is only who would be late even if the queue went as many times as fast as by its pace: of those ahead
/// some leave, and a burst begins slower than it goes on.
const DOUBT: u32 = 4;

/// Gives turns, the earliest deadline first. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    queue: Queue,
    /// How those are told that wait.
    called: HashMap<Place, oneshot::Sender<()>>,
}

impl State {
    /// Has whoever is next work in place of one that stopped.
    fn stop(&mut self) {
        let next = self
            .queue
            .stop()
            .and_then(|place| self.called.remove(&place));
        if let Some(next) = next {
            // One that is gone meanwhile stops in its turn.
            next.send(()).unwrap_or_default();
        }
    }
}

impl Admission {
    /// For as many at once.
    pub fn new(max: NonZeroUsize) -> Self {
        let state = State {
            queue: Queue::new(max),
            called: HashMap::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.lock().queue.waiting()
    }

    /// How many are worked on.
    pub fn working(&self) -> usize {
        self.lock().queue.working()
    }

    /// A turn, for one whose steps forward must begin before `until`. Dropped, it leaves the queue.
    ///
    /// # Errors
    ///
    /// OVERLOADED: at once where what is ahead would take far longer, by what earlier turns took; at `until` where it
    /// did.
    pub async fn turn(&self, until: Instant) -> Result<Turn, Failure> {
        let place = {
            let mut state = self.lock();
            let place = state.queue.place(until);
            if Instant::now() + state.queue.wait(place) / DOUBT >= until {
                return Err(refusal(&state.queue, place));
            }
            place
        };
        self.wait(place).await?;
        Ok(Turn {
            admission: self.clone(),
            place,
            worked: Duration::ZERO,
            since: Some(Instant::now()),
        })
    }

    async fn wait(&self, place: Place) -> Result<(), Failure> {
        let called = {
            let mut state = self.lock();
            if state.queue.enter(place) {
                return Ok(());
            }
            let (call, called) = oneshot::channel();
            state.called.insert(place, call);
            called
        };
        let mut waiting = Waiting {
            admission: self,
            place: Some(place),
        };
        // The sender lives in the queue for as long as the place is there.
        if let Ok(Ok(())) = timeout_at(place.deadline, called).await {
            waiting.place = None;
            return Ok(());
        }
        let refused = refusal(&self.lock().queue, place);
        Err(refused)
    }
}

fn refusal(queue: &Queue, place: Place) -> Failure {
    let (ahead, wait) = (queue.ahead(place), queue.wait(place));
    let message = format!(
        "{ahead} ADDs are ahead, about {:.1} s of work, and the caller's time is over before",
        wait.as_secs_f32()
    );
    Failure::new(Reason::Overloaded, message).retry_after(wait.max(COME_BACK))
}

/// One that waits. Dropped, it leaves the queue, or passes on the turn that it was just given.
struct Waiting<'a> {
    admission: &'a Admission,
    place: Option<Place>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place else {
            return;
        };
        let mut state = self.admission.lock();
        if state.queue.leave(place) {
            state.called.remove(&place);
        } else {
            state.stop();
        }
    }
}

/// The right to work.
#[derive(Debug)]
pub struct Turn {
    admission: Admission,
    place: Place,
    worked: Duration,
    since: Option<Instant>,
}

impl Turn {
    /// Lays the turn down: somebody else is awaited.
    pub fn rest(&mut self) {
        if let Some(since) = self.since.take() {
            self.worked += since.elapsed();
            self.admission.lock().stop();
        }
    }

    /// Takes it up again, in its place among those who wait.
    ///
    /// # Errors
    ///
    /// OVERLOADED, when its turn does not come in time.
    pub async fn resume(&mut self) -> Result<(), Failure> {
        if self.since.is_none() {
            self.admission.wait(self.place).await?;
            self.since = Some(Instant::now());
        }
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.rest();
        self.admission.lock().queue.took(self.worked);
    }
}

#[cfg(test)]
mod tests;
