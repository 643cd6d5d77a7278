//! What people and watchers are shown of the ledger.

use inpod_types::{PodUid, SandboxRef};

use super::Ledger;
use crate::{
    sessions::SessionId,
    view::{self, Event, SessionView, WorkloadView},
};

impl Ledger {
    /// The sessions as they are now, oldest first.
    pub fn session_views(&self) -> Vec<SessionView> {
        let slots = self.sessions.iter();
        slots.map(|(id, slot)| view::session(id, slot)).collect()
    }

    /// The desired pods in a session as they are now.
    pub fn workload_views(&self, id: SessionId) -> Vec<WorkloadView> {
        let uids = self.desired.uids();
        uids.filter_map(|uid| self.workload_view(id, uid)).collect()
    }

    /// A desired pod in a session as it is now.
    pub fn workload_view(&self, id: SessionId, uid: &PodUid) -> Option<WorkloadView> {
        let slot = self.sessions.get(id)?;
        let sandbox = &self.desired.current(uid)?.workload().sandbox;
        Some(view::workload(
            self.known(),
            id,
            &slot.session,
            uid,
            sandbox,
        ))
    }

    pub(super) fn tell_session(&mut self, id: SessionId) {
        if let Some(slot) = self.sessions.get(id) {
            let event = Event::Session(view::session(id, slot));
            self.events.push(event);
        }
    }

    pub(super) fn tell(&mut self, id: SessionId, uid: &PodUid, sandbox: &SandboxRef) {
        if let Some(slot) = self.sessions.get(id) {
            let view = view::workload(self.known(), id, &slot.session, uid, sandbox);
            self.events.push(Event::Workload(view));
        }
    }
}
