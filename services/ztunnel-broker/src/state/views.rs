use inpod_types::PodUid;

use super::State;
use crate::{
    session_view::{self, SessionView, WorkloadView},
    sessions::SessionId,
};

impl State {
    /// Returns the sessions by session number, oldest first.
    pub fn session_views(&self) -> Vec<SessionView> {
        let slots = self.sessions.iter();
        slots
            .map(|(id, slot)| session_view::session(id, slot))
            .collect()
    }

    pub fn workload_views(&self, id: SessionId) -> Vec<WorkloadView> {
        let uids = self.desired.uids();
        uids.filter_map(|uid| self.workload_view(id, uid)).collect()
    }

    pub fn workload_view(&self, id: SessionId, uid: &PodUid) -> Option<WorkloadView> {
        let slot = self.sessions.get(id)?;
        let sandbox = &self.desired.current(uid)?.workload().sandbox;
        Some(session_view::workload(
            self.inputs(),
            id,
            &slot.session,
            uid,
            sandbox,
        ))
    }

    pub(super) fn report_session(&mut self, id: SessionId) {
        if let Some(slot) = self.sessions.get(id) {
            self.events.push(session_view::session(id, slot));
        }
    }
}
