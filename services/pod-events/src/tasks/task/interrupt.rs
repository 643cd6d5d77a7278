//! Interrupts the wait for ztunnel for commands that must not queue behind the wait.

use tokio::sync::watch;

use super::{CancelReason, Command};

/// Counts commands by urgency, both sent commands (`sent`) and handled commands (`seen`): while `sent` is ahead, a
/// command is waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interrupts {
    routine: u64,
    urgent: u64,
}

impl Interrupts {
    pub(crate) fn count(&mut self, command: &Command) {
        match command {
            Command::Delete(..) | Command::ReplayDelete(..) | Command::Reclaim(_) => {
                self.urgent += 1;
            }
            Command::Add(..) | Command::Reconcile | Command::Resync(_) | Command::ReplayAdd(..) => {
                self.routine += 1;
            }
            Command::RulesDrifted(..) | Command::NetnsReleased(..) | Command::Adopt(..) => {}
        }
    }
}

/// Resolves when the end of a sandbox or a restarted netconfig waits behind an ADD.
pub(super) async fn urgent(
    mut sent: watch::Receiver<Interrupts>,
    seen: Interrupts,
) -> CancelReason {
    // On an error, the sender is gone because the process ends.
    drop(sent.wait_for(|sent| sent.urgent > seen.urgent).await);
    CancelReason::Interrupted
}

pub(super) async fn any(mut sent: watch::Receiver<Interrupts>, seen: Interrupts) -> CancelReason {
    drop(
        sent.wait_for(|sent| sent.urgent > seen.urgent || sent.routine > seen.routine)
            .await,
    );
    CancelReason::Interrupted
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_reconcile_interrupts_background_enrollments_and_no_add() {
        let (sender, sent) = watch::channel(Interrupts::default());
        let seen = Interrupts::default();
        sender.send_modify(|sent| sent.count(&Command::Reconcile));
        assert_eq!(urgent(sent.clone(), seen).now_or_never(), None);
        assert_eq!(
            any(sent, seen).now_or_never(),
            Some(CancelReason::Interrupted)
        );
    }

    #[tokio::test]
    async fn a_command_that_was_handled_interrupts_nothing() {
        let (sender, sent) = watch::channel(Interrupts::default());
        let command = Command::Reclaim(tokio::sync::oneshot::channel().0);
        let mut seen = Interrupts::default();
        sender.send_modify(|sent| sent.count(&command));
        assert_eq!(
            urgent(sent.clone(), seen).now_or_never(),
            Some(CancelReason::Interrupted)
        );
        seen.count(&command);
        assert_eq!(urgent(sent, seen).now_or_never(), None);
    }
}
