//! netconfig and the broker as seen by pod-events: each call may meet a fault, has its effect on the [`Node`], and is a
//! point at which pod-events may crash.

mod broker;
mod netconfig;

use std::time::Duration;

use futures_util::{FutureExt as _, future::BoxFuture};
use inpod_proto::into_status;
use inpod_types::{Failure, SandboxRef};
use tokio::{
    sync::{oneshot, watch},
    time::sleep,
};
use tonic::{Response, Status};

use super::node::{Fault, Method, Node, SharedNode};
use crate::testing::since_boot;

#[derive(Clone, Debug)]
pub(super) struct Services(pub(super) SharedNode);

type Answer<T> = Result<Response<T>, Status>;

fn disconnected() -> Status {
    Status::unavailable("the connection broke")
}

async fn hang<T>() -> T {
    std::future::pending().await
}

fn to_duration(millis: u32) -> Duration {
    Duration::from_millis(millis.into())
}

impl Services {
    fn begin(&self, method: Method, about: Option<&SandboxRef>) -> Result<Option<Fault>, bool> {
        let mut node = self.0.lock();
        node.count_call();
        node.step();
        if node.dead {
            return Err(true);
        }
        let fault = node.take_fault(method);
        node.note(|| {
            let about = about.map(ToString::to_string).unwrap_or_default();
            let fault = fault
                .map(|fault| format!("  ({fault:?})"))
                .unwrap_or_default();
            format!("  {method:?} {about}{fault}")
        });
        Ok(fault)
    }

    /// Returns whether pod-events has crashed before it could receive the answer.
    fn end(&self, error: Option<&Status>) -> bool {
        let mut node = self.0.lock();
        node.step();
        if let Some(status) = error {
            node.note(|| format!("    {}", status.message()));
        }
        node.dead
    }

    fn is_up(&self, method: Method) -> (bool, watch::Receiver<u64>) {
        let node = self.0.lock();
        let (up_at, instance) = if method < Method::AddWorkload {
            (node.netconfig.up_at, &node.netconfig.instance)
        } else {
            (node.broker.up_at, &node.broker.instance)
        };
        (since_boot() >= up_at, instance.subscribe())
    }

    /// Performs a call whose effect takes no time.
    async fn call<T: Send + 'static>(
        &self,
        method: Method,
        about: Option<SandboxRef>,
        effect: impl FnOnce(&mut Node) -> Result<T, Failure> + Send + 'static,
    ) -> Answer<T> {
        let effect = |services: Self| {
            async move {
                let result = effect(&mut services.0.lock());
                result.map_err(|failure| into_status(&failure))
            }
            .boxed()
        };
        self.perform(method, about, effect).await
    }

    async fn perform<T: Send + 'static>(
        &self,
        method: Method,
        about: Option<SandboxRef>,
        effect: impl FnOnce(Self) -> BoxFuture<'static, Result<T, Status>> + Send + 'static,
    ) -> Answer<T> {
        let Ok(fault) = self.begin(method, about.as_ref()) else {
            return hang().await;
        };
        let (is_up, mut instance) = self.is_up(method);
        if !is_up || fault == Some(Fault::Refused) {
            return Err(disconnected());
        }
        let fault = match fault {
            // The broker gives up a call whose caller is gone.
            Some(Fault::Late(late)) if method >= Method::AddWorkload => {
                Some(Fault::AnswerLate(late))
            }
            fault => fault,
        };
        let work = self.work(fault, about, effect);
        tokio::select! {
            biased;
            // The service was restarted.
            _ = instance.changed() => Err(disconnected()),
            result = work => result.map(Response::new),
        }
    }

    async fn work<T: Send + 'static>(
        &self,
        fault: Option<Fault>,
        about: Option<SandboxRef>,
        effect: impl FnOnce(Self) -> BoxFuture<'static, Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        if let Some(sandbox) = &about {
            self.wait_for_netns(sandbox).await;
        }
        let result = match fault {
            Some(Fault::Hangs) => return hang().await,
            Some(Fault::Late(late)) => self.finish_late(to_duration(late), about, effect).await,
            _ => effect(self.clone()).await,
        };
        if self.end(result.as_ref().err()) {
            return hang().await;
        }
        match fault {
            Some(Fault::AnswerLost) => Err(disconnected()),
            Some(Fault::AnswerHangs) => hang().await,
            Some(Fault::AnswerLate(late)) => {
                sleep(to_duration(late)).await;
                result
            }
            _ => result,
        }
    }

    /// Waits for earlier work, because netconfig changes a netns in only a single task at a time.
    async fn wait_for_netns(&self, sandbox: &SandboxRef) {
        loop {
            let busy = self.0.lock().netconfig.busy.get(sandbox).copied();
            let left = busy.unwrap_or_default().saturating_sub(since_boot());
            if left.is_zero() {
                return;
            }
            sleep(left + Duration::from_millis(1)).await;
        }
    }

    /// Finishes the work late: the work outlives the call that started it, but not the service.
    async fn finish_late<T: Send + 'static>(
        &self,
        late: Duration,
        about: Option<SandboxRef>,
        effect: impl FnOnce(Self) -> BoxFuture<'static, Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        let before = {
            let mut node = self.0.lock();
            if let Some(sandbox) = about {
                node.netconfig.busy.insert(sandbox, since_boot() + late);
            }
            *node.netconfig.instance.borrow()
        };
        let (reply, answer) = oneshot::channel();
        let services = self.clone();
        tokio::spawn(async move {
            sleep(late).await;
            let now = *services.0.lock().netconfig.instance.borrow();
            if now == before {
                drop(reply.send(effect(services).await));
            }
        });
        answer.await.unwrap_or_else(|_| Err(disconnected()))
    }
}
