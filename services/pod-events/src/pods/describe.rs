//! Describes the next step of a pod to operators, and what the step waits for.

use super::{
    next::{Wait, Wish, World, wishes},
    state::{Act, Pod, Step},
};

/// Describes the next step: the first wish without a reason to wait or, if there is none, the wish that is due first.
/// Returns an empty text if nothing is left to do.
pub(crate) fn describe_next(pod: &Pod, world: &World) -> String {
    let wishes = wishes(pod, world);
    let due = |wish: &&Wish| match wish.wait {
        None => (0, None),
        Some(Wait::Until(at)) => (1, Some(at)),
        Some(Wait::Netconfig | Wait::Broker | Wait::Input) => (2, None),
    };
    let Some(wish) = wishes.iter().min_by_key(due) else {
        return String::new();
    };
    let step = match wish.step {
        Step::Find => "search the node's processes for its netns",
        Step::Take(_, act) => act.describe(),
        Step::Rest(_) => "wait",
    };
    match wish.wait {
        None => step.to_owned(),
        Some(Wait::Until(at)) => {
            let seconds = at.since(world.now).as_secs_f32();
            format!("{step}, in {seconds:.1} s")
        }
        Some(Wait::Netconfig) => format!("{step}, once netconfig is reachable"),
        Some(Wait::Broker) => format!("{step}, once ztunnel-broker has the desired set"),
        Some(Wait::Input) => format!("{step}, once the API server shows so"),
    }
}

impl Act {
    fn describe(self) -> &'static str {
        match self {
            Self::Permit => "take one of the places of working ADDs",
            Self::Identify => "learn its UID and service account from the source",
            Self::Begin => "record that its enrollment begins",
            Self::Claim => "claim its netns",
            Self::AddWorkload => "give ztunnel its netns",
            Self::Apply => "apply its rules",
            Self::Verify => "verify its rules and repair them",
            Self::Update => "apply changed annotations or addresses",
            Self::CheckListeners => "check whether ztunnel listens in its netns",
            Self::Readd => "give ztunnel its netns again",
            Self::Announce => "announce to its peers that it leaves the mesh",
            Self::Leave => "record that its withdrawal is announced",
            Self::Drain => "let its new connections go direct",
            Self::CountFlows => "count its captured connections; without any, it leaves the mesh",
            Self::Withdraw => "remove its rules, its workload and its claim",
            Self::Detach => "release its netns; its sidecar's redirection stays",
            Self::Locate => "search the node's processes for its netns",
            Self::Look => "look which processes run in its netns",
            Self::Forget => "forget its sandbox",
            Self::Reject => "manage its sandbox again, because its runtime's DEL was wrong",
            Self::GiveUp => "leave the undo of its failed ADD to later steps",
            Self::Answer => "answer its ADD",
        }
    }
}
