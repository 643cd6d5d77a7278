//! The connected ztunnels, and the cause of the last loss of a ztunnel.

use std::{collections::BTreeMap, fmt, time::Instant};

use crate::{
    peer::Peer,
    session::{Session, Stage},
};

/// The ID of a session, unique and ascending within a run of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Debug)]
pub struct Slot {
    pub session: Session,
    pub peer: Peer,
    pub since: Instant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    pub at: Instant,
    pub why: String,
}

#[derive(Debug, Default)]
pub struct Sessions {
    open: BTreeMap<SessionId, Slot>,
    opened: u64,
    lost: Option<Lost>,
}

impl Sessions {
    pub fn open(&mut self, slot: Slot) -> SessionId {
        self.opened += 1;
        let id = SessionId(self.opened);
        self.open.insert(id, slot);
        id
    }

    /// Closes a session. A session without a hello may not have been a ztunnel and does not count as lost.
    pub fn close(&mut self, id: SessionId, why: &str, now: Instant) -> Option<Slot> {
        let slot = self.open.remove(&id)?;
        if slot.session.stage() != Stage::Connected {
            let why = why.to_owned();
            self.lost = Some(Lost { at: now, why });
        }
        Some(slot)
    }

    pub fn get(&self, id: SessionId) -> Option<&Slot> {
        self.open.get(&id)
    }

    pub fn get_mut(&mut self, id: SessionId) -> Option<&mut Slot> {
        self.open.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (SessionId, &Slot)> {
        self.open.iter().map(|(id, slot)| (*id, slot))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.open.values_mut().map(|slot| &mut slot.session)
    }

    pub fn greeted(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        let sessions = self.open.iter().map(|(id, slot)| (*id, &slot.session));
        sessions.filter(|(_, session)| session.stage() != Stage::Connected)
    }

    pub fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }
}
