//! The connected ztunnels, and when the last one was lost.

use std::{collections::BTreeMap, fmt, time::Instant};

use crate::{
    peer::Peer,
    session::{Session, Stage},
};

/// A session's number: unique within one run of the broker, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A connected ztunnel.
#[derive(Debug)]
pub struct Slot {
    /// What it was told.
    pub session: Session,
    /// Who it is.
    pub peer: Peer,
    /// When it connected.
    pub since: Instant,
}

/// A ztunnel that was there and has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// When.
    pub at: Instant,
    /// Why, for people.
    pub why: String,
}

/// The connected ztunnels, oldest first.
#[derive(Debug, Default)]
pub struct Sessions {
    open: BTreeMap<SessionId, Slot>,
    opened: u64,
    lost: Option<Lost>,
}

impl Sessions {
    /// Takes in a ztunnel that has connected.
    pub fn open(&mut self, slot: Slot) -> SessionId {
        self.opened += 1;
        let id = SessionId(self.opened);
        self.open.insert(id, slot);
        id
    }

    /// Lets one go. One that never said hello may not have been a ztunnel and is no loss.
    pub fn close(&mut self, id: SessionId, why: &str, now: Instant) -> Option<Slot> {
        let slot = self.open.remove(&id)?;
        if slot.session.stage() != Stage::Connected {
            let why = why.to_owned();
            self.lost = Some(Lost { at: now, why });
        }
        Some(slot)
    }

    /// One of them.
    pub fn get(&self, id: SessionId) -> Option<&Slot> {
        self.open.get(&id)
    }

    /// One of them, to drive.
    pub fn get_mut(&mut self, id: SessionId) -> Option<&mut Slot> {
        self.open.get_mut(&id)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (SessionId, &Slot)> {
        self.open.iter().map(|(id, slot)| (*id, slot))
    }

    /// All of them, to drive.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.open.values_mut().map(|slot| &mut slot.session)
    }

    /// Those that have said hello.
    pub fn greeted(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        let sessions = self.open.iter().map(|(id, slot)| (*id, &slot.session));
        sessions.filter(|(_, session)| session.stage() != Stage::Connected)
    }

    /// The last one that was lost.
    pub fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }
}
