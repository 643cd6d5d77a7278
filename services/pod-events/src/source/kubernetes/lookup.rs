//! The question past the watch.

use std::{fmt, sync::Arc, time::Duration};

use inpod_types::NamespaceName;
use k8s_openapi::api::core::v1 as k8s;
use kube::{Api, Client, core::PartialObjectMeta};
use tokio::time::{Instant, sleep, timeout_at};

use super::{Known, pace::Pace, seen_namespace, seen_pod};
use crate::{
    pod::Pod,
    source::{Inventory, Learnt, PodKey, Scope},
};

/// How long one question may take. An API server that is slower does not answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often a pod is asked for again that the watch has not told of. In a watch that works it is so within
/// milliseconds.
const CONFIRM: Duration = Duration::from_secs(30);

/// Asks the API server for single objects.
#[derive(Clone)]
pub(in crate::source) struct Lookup {
    client: Client,
    pace: Pace,
    scope: Scope,
    known: Arc<Known>,
}

impl fmt::Debug for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup")
            .field("node", &self.scope.node)
            .finish_non_exhaustive()
    }
}

impl Lookup {
    pub(super) fn new(client: Client, pace: Pace, scope: Scope, known: Arc<Known>) -> Self {
        Self {
            client,
            pace,
            scope,
            known,
        }
    }

    /// The way to the API server.
    pub(in crate::source) fn client(&self) -> Client {
        self.client.clone()
    }

    fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.known.inventory.borrow())
    }

    /// Waits for the first lists, then asks for the pod, then for its namespace; ends as soon as there is enough.
    pub(in crate::source) async fn look(
        &self,
        key: &PodKey,
        until: Instant,
        is_enough: impl Fn(&Inventory) -> bool,
    ) -> Learnt {
        self.first_lists(until).await;
        if is_enough(&self.inventory()) {
            return Learnt::Known(self.inventory());
        }
        match self.ask_for_pod(key, until).await {
            Ok(Some(pod)) if pod.node.as_ref() != Some(&self.scope.node) => {
                return Learnt::Elsewhere(pod.node);
            }
            Ok(_) => {}
            Err(why) => return Learnt::Unanswered(why),
        }
        let inventory = self.inventory();
        let settled = inventory.pod(key).is_none() || is_enough(&inventory);
        if !settled && let Err(why) = self.ask_for_namespace(&key.0, until).await {
            return Learnt::Unanswered(why);
        }
        Learnt::Known(self.inventory())
    }

    /// Half of the time is kept for the question.
    async fn first_lists(&self, until: Instant) {
        let now = Instant::now();
        let half = now + until.saturating_duration_since(now) / 2;
        let mut health = self.known.health.subscribe();
        // A server that has failed to answer is not waited for.
        let first = health.wait_for(Option::is_some);
        let _late = timeout_at(half, first).await;
    }

    /// The pod, which is known from then on if it is of this node.
    async fn ask_for_pod(&self, key: &PodKey, until: Instant) -> Result<Option<Pod>, String> {
        let (namespace, name) = key;
        let api = Api::<k8s::Pod>::namespaced(self.client.clone(), namespace.as_str());
        let Some(pod) = self.answered(|| api.get_opt(name.as_str()), until).await? else {
            self.known.change(|store| store.pods.unlearn(key));
            return Ok(None);
        };
        let seen = seen_pod(pod);
        let cannot_be_used = |why| format!("{} cannot be used: {why}", seen.title);
        let (key, pod) = seen.parsed.map_err(cannot_be_used)?;
        if pod.node.as_ref() == Some(&self.scope.node) {
            let learnt = pod.clone();
            self.known
                .change(|store| store.pods.learn(key, seen.version, learnt));
        }
        Ok(Some(pod))
    }

    async fn ask_for_namespace(&self, name: &NamespaceName, until: Instant) -> Result<(), String> {
        let api = Api::<PartialObjectMeta<k8s::Namespace>>::all(self.client.clone());
        let Some(namespace) = self.answered(|| api.get_opt(name.as_str()), until).await? else {
            self.known.change(|store| store.namespaces.unlearn(name));
            return Ok(());
        };
        let seen = seen_namespace(namespace, &self.scope.namespace_labels);
        let cannot_be_used = |why| format!("{} cannot be used: {why}", seen.title);
        let (name, namespace) = seen.parsed.map_err(cannot_be_used)?;
        self.known
            .change(|store| store.namespaces.learn(name, seen.version, namespace));
        Ok(())
    }

    /// Asks again, for ever, for pods that were asked for and that the watch has not told of: they may be gone.
    pub(super) async fn confirm(self) {
        loop {
            sleep(CONFIRM).await;
            let pods = self.known.change(|store| store.pods.unconfirmed());
            for key in pods {
                if let Err(why) = self.ask_for_pod(&key, Instant::now() + ANSWER).await {
                    tracing::debug!(pod = format!("{}/{}", key.0, key.1), why, "Not confirmed");
                }
            }
        }
    }

    /// Asks once, and again where the server names a time for that which is soon enough: no later than an answer may
    /// take. What it was given to rest is not taken from the time for the answer.
    async fn answered<T, F>(&self, ask: impl Fn() -> F, until: Instant) -> Result<Option<T>, String>
    where
        F: Future<Output = kube::Result<Option<T>>>,
    {
        let rests_until = until.min(Instant::now() + ANSWER);
        let mut refusal = "the API server has refused another question".to_owned();
        loop {
            let rest = self.pace.rest();
            if !rest.is_zero() && Instant::now() + rest >= rests_until {
                let seconds = rest.as_secs_f32();
                return Err(format!("{refusal}; it wants rest for {seconds:.1} s more"));
            }
            sleep(rest).await;
            match timeout_at(until.min(Instant::now() + ANSWER), ask()).await {
                Ok(Err(error)) if !self.pace.rest().is_zero() => refusal = inpod_kube::told(&error),
                Ok(answer) => return answer.map_err(|error| inpod_kube::told(&error)),
                Err(_) => return Err("the API server does not answer in time".to_owned()),
            }
        }
    }
}
