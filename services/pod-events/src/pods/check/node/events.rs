//! The events from outside of the core.

use std::time::Duration;

use super::{Leave, Netns, Node, Rules, Shown};
use crate::pods::{
    check::Core,
    state::{Add, Proxy},
};

/// The time of an ADD, and the part of it for steps forward.
const ADD_TIME: Duration = Duration::from_secs(30);
const WORK_TIME: Duration = Duration::from_secs(27);

const CONTEST_DELAY: Duration = Duration::from_secs(120);

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(in super::super) enum Event {
            $($(#[$doc])* $name,)*
        }

        impl Event {
            pub(in super::super) const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

events! {
    /// The ADD of a new sandbox.
    Add,
    /// Another ADD of the newest sandbox.
    RepeatAdd,
    /// The DEL of the newest sandbox.
    Delete,
    /// The DEL of the sandbox before the newest one.
    DeleteEarlier,
    /// The caller of the newest sandbox's ADD disconnects.
    CallerLeaves,
    /// The processes of the newest sandbox end.
    End,
    /// The pod's label is set or removed.
    Label,
    /// The source shows the pod no longer, again, or as terminating.
    Vanish, Appear, Terminate,
    /// The source becomes incomplete.
    Forget,
    Uninstall, HandOver,
    /// The uninstall or handover is cancelled.
    Stay,
    NetconfigRestarts, NetconfigStops, BrokerRestarts, BrokerStops,
    /// The core restarts from its checkpoint.
    Crash,
    /// Something removes the rules, and netconfig reports it.
    Drift,
    /// ztunnel stops listening in the netns, and the listeners are to be checked.
    Deafen,
    /// Another agent keeps undoing repairs, so repairs are delayed.
    Contest,
    /// The requested settings change.
    Settings,
    /// The step in flight takes until the next deadline of an ADD.
    TimePasses,
}

impl Node {
    pub(super) fn can_happen(&self, event: Event) -> bool {
        let newest = |is: &dyn Fn(&Netns) -> bool| self.netns.last().is_some_and(is);
        let is_deletable = |it: &Netns| self.sandbox(it.number).is_some() && !it.was_deleted;
        let has_add = |it: &Netns| self.sandbox(it.number).is_some_and(|it| it.add.is_some());
        match event {
            Event::Add => self.netns.len() < 2 && self.next_number < 4,
            Event::RepeatAdd => newest(&|it| it.number > 0 && !has_add(it) && !it.was_deleted),
            Event::Delete => newest(&is_deletable),
            Event::DeleteEarlier => self.netns.len() == 2 && is_deletable(&self.netns[0]),
            Event::CallerLeaves => newest(&has_add),
            Event::End => newest(&|it| it.is_running),
            Event::Label | Event::Crash => true,
            Event::Vanish => self.shown != Shown::Missing,
            Event::Appear => self.shown == Shown::Missing,
            Event::Terminate => self.shown == Shown::Running,
            Event::Forget => self.shown == Shown::Missing && self.is_complete,
            Event::Uninstall | Event::HandOver => self.leave.is_none(),
            Event::Stay => self.leave.is_some(),
            Event::NetconfigRestarts | Event::NetconfigStops => self.netconfig < 3,
            Event::BrokerRestarts | Event::BrokerStops => self.broker < 3,
            Event::Drift => newest(&|it| it.rules == Rules::Complete && it.claim.is_some()),
            Event::Deafen => newest(&|it| it.has_listeners),
            Event::Contest => self.pod.repairs_from.is_none(),
            Event::Settings => self.is_in_sync,
            Event::TimePasses => self.flight.is_some() && self.next_deadline().is_some(),
        }
    }

    pub(super) fn happen(&mut self, event: Event, core: &Core) {
        match event {
            Event::Add => {
                self.netns.push(Netns::new(self.next_number));
                self.next_number += 1;
                self.expect(core);
            }
            Event::RepeatAdd => self.expect(core),
            Event::Delete => self.delete(self.netns.len() - 1, core),
            Event::DeleteEarlier => self.delete(0, core),
            Event::Label => self.is_labelled = !self.is_labelled,
            Event::Vanish => (self.shown, self.gone_since) = (Shown::Missing, Some(self.now)),
            Event::Appear => {
                (self.shown, self.gone_since, self.is_complete) = (Shown::Running, None, true);
            }
            Event::Terminate => self.shown = Shown::Terminating,
            Event::Forget => self.is_complete = false,
            Event::Uninstall => self.leave = Some(Leave::Uninstall),
            Event::HandOver => self.leave = Some(Leave::Handover),
            Event::Stay => self.leave = None,
            Event::NetconfigRestarts | Event::NetconfigStops => {
                self.netconfig += 1;
                self.is_netconfig_up = event == Event::NetconfigRestarts;
                self.netns.iter_mut().for_each(|it| it.claim = None);
            }
            Event::BrokerRestarts | Event::BrokerStops => {
                self.restart_broker();
                self.is_broker_up = event == Event::BrokerRestarts;
            }
            Event::Crash => {
                self.flight = None;
                self.pod = self.pod.reload();
                self.is_check_due |= self.netns.iter().any(|it| !it.has_listeners);
                self.netns
                    .iter_mut()
                    .for_each(|it| it.awaits_answer = false);
            }
            Event::CallerLeaves | Event::End | Event::Drift | Event::Deafen => {
                self.disturb_newest(event);
            }
            Event::Contest => self.pod.repairs_from = Some(self.now + CONTEST_DELAY),
            Event::Settings => self.is_in_sync = false,
            Event::TimePasses => self.now = self.next_deadline().map_or(self.now, |(at, _)| at),
        }
        if wakes(event) {
            self.pod.wake();
        }
    }

    /// Records an ADD of the newest sandbox.
    fn expect(&mut self, core: &Core) {
        let add = Add {
            work_deadline: self.now + WORK_TIME,
            deadline: self.now + ADD_TIME,
            goal: None,
            has_permit: false,
            is_failed: false,
            is_repeated: false,
            is_deleted: false,
        };
        if let Some(netns) = self.netns.last_mut() {
            (netns.was_refused, netns.awaits_answer) = (false, true);
            (core.expect)(&mut self.pod, netns.number, add);
        }
    }

    fn delete(&mut self, index: usize, core: &Core) {
        self.netns[index].was_deleted = true;
        (core.delete)(&mut self.pod, self.netns[index].number, self.now);
    }

    /// Lets an event happen to the newest sandbox, and reports it to the core.
    fn disturb_newest(&mut self, event: Event) {
        let Some(netns) = self.netns.last_mut() else {
            return;
        };
        let was_claimed = netns.claim.is_some();
        if event == Event::Deafen {
            (netns.has_listeners, netns.is_broken) = (false, true);
            self.is_check_due = true;
        } else if event == Event::Drift {
            netns.rules = Rules::None;
        } else if event == Event::End {
            (netns.is_running, netns.rules, netns.claim) = (false, Rules::None, None);
        }
        let Some(sandbox) = self.pod.sandbox_mut(netns.number) else {
            return;
        };
        if event == Event::Drift {
            sandbox.suspect();
        } else if event == Event::End && was_claimed {
            sandbox.lose_claim();
        } else if event == Event::CallerLeaves
            && let Some(add) = &mut sandbox.add
        {
            add.is_failed = true;
        }
    }

    /// Restarts the broker, which receives the desired workloads from the core.
    fn restart_broker(&mut self) {
        self.broker += 1;
        for netns in &mut self.netns {
            let mut sandboxes = self.pod.sandboxes.iter();
            let sandbox = sandboxes.find(|it| it.number == netns.number);
            netns.has_workload =
                sandbox.is_some_and(|it| it.phase.has_effects() && it.proxy == Proxy::Ztunnel);
            let is_served = netns.has_listeners || netns.claim.is_some();
            netns.has_listeners = netns.has_workload && is_served;
            netns.removed_at = 0;
        }
    }
}

/// Returns whether the event ends the delays of all retries.
fn wakes(event: Event) -> bool {
    matches!(
        event,
        Event::Label
            | Event::Vanish
            | Event::Appear
            | Event::Terminate
            | Event::Forget
            | Event::Uninstall
            | Event::HandOver
            | Event::Stay
            | Event::Settings
            | Event::NetconfigRestarts
            | Event::NetconfigStops
            | Event::BrokerRestarts
            | Event::BrokerStops
    )
}
