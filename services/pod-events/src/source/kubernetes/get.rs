//! Single GETs past the watch.

use std::{fmt, sync::Arc, time::Duration};

use inpod_types::NamespaceName;
use k8s_openapi::api::core::v1 as k8s;
use kube::{Api, Client, core::PartialObjectMeta};
use tokio::time::{Instant, sleep, timeout_at};

use super::{Cache, observe_namespace, observe_pod, retry_after::RetryAfter};
use crate::{
    inventory::Inventory,
    pod::{Pod, PodKey},
    source::{RefreshOutcome, Scope},
};

/// A slower API server counts as unavailable.
const GET_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval of fetching a pod that the watch has not reported. A working watch reports the pod within milliseconds.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(in crate::source) struct ApiReader {
    client: Client,
    retry_after: RetryAfter,
    scope: Scope,
    cache: Arc<Cache>,
}

impl fmt::Debug for ApiReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiReader")
            .field("node", &self.scope.node)
            .finish_non_exhaustive()
    }
}

impl ApiReader {
    pub(super) fn new(
        client: Client,
        retry_after: RetryAfter,
        scope: Scope,
        cache: Arc<Cache>,
    ) -> Self {
        Self {
            client,
            retry_after,
            scope,
            cache,
        }
    }

    pub(in crate::source) fn client(&self) -> Client {
        self.client.clone()
    }

    fn inventory(&self) -> Arc<Inventory> {
        Arc::clone(&self.cache.inventory.borrow())
    }

    /// Waits for the first lists, then fetches the pod and its namespace. Returns as soon as `is_enough` holds.
    pub(in crate::source) async fn refresh(
        &self,
        key: &PodKey,
        until: Instant,
        is_enough: impl Fn(&Inventory) -> bool,
    ) -> RefreshOutcome {
        self.wait_for_first_lists(until).await;
        if is_enough(&self.inventory()) {
            return RefreshOutcome::Current(self.inventory());
        }
        match self.get_pod(key, until).await {
            Ok(Some(pod)) if pod.node.as_ref() != Some(&self.scope.node) => {
                return RefreshOutcome::OtherNode(pod.node);
            }
            Ok(_) => {}
            Err(why) => return RefreshOutcome::Unavailable(why),
        }
        let inventory = self.inventory();
        let settled = inventory.pod(key).is_none() || is_enough(&inventory);
        if !settled && let Err(why) = self.get_namespace(&key.0, until).await {
            return RefreshOutcome::Unavailable(why);
        }
        RefreshOutcome::Current(self.inventory())
    }

    /// Waits for the first lists, and leaves half of the time for the GETs.
    async fn wait_for_first_lists(&self, until: Instant) {
        let now = Instant::now();
        let half = now + until.saturating_duration_since(now) / 2;
        let mut health = self.cache.health.subscribe();
        // Health is set as soon as the server fails, so a failed server is not waited for.
        let first = health.wait_for(Option::is_some);
        let _late = timeout_at(half, first).await;
    }

    /// Fetches a pod, and stores the pod if it belongs to this node.
    async fn get_pod(&self, key: &PodKey, until: Instant) -> Result<Option<Pod>, String> {
        let (namespace, name) = key;
        let api = Api::<k8s::Pod>::namespaced(self.client.clone(), namespace.as_str());
        let Some(pod) = self.request(|| api.get_opt(name.as_str()), until).await? else {
            self.cache.update(|stores| stores.pods.remove_fetched(key));
            return Ok(None);
        };
        let observed = observe_pod(pod);
        let cannot_be_used = |why| format!("{} cannot be used: {why}", observed.title);
        let (key, pod) = observed.parsed.map_err(cannot_be_used)?;
        if pod.node.as_ref() == Some(&self.scope.node) {
            let fetched = pod.clone();
            self.cache
                .update(|stores| stores.pods.insert_fetched(key, observed.version, fetched));
        }
        Ok(Some(pod))
    }

    async fn get_namespace(&self, name: &NamespaceName, until: Instant) -> Result<(), String> {
        let api = Api::<PartialObjectMeta<k8s::Namespace>>::all(self.client.clone());
        let Some(namespace) = self.request(|| api.get_opt(name.as_str()), until).await? else {
            self.cache
                .update(|stores| stores.namespaces.remove_fetched(name));
            return Ok(());
        };
        let observed = observe_namespace(namespace, &self.scope.namespace_labels);
        let cannot_be_used = |why| format!("{} cannot be used: {why}", observed.title);
        let (name, namespace) = observed.parsed.map_err(cannot_be_used)?;
        self.cache.update(|stores| {
            stores
                .namespaces
                .insert_fetched(name, observed.version, namespace);
        });
        Ok(())
    }

    /// Fetches unreported pods again, because the pods may be gone.
    pub(super) async fn confirm_fetched(self) {
        loop {
            sleep(CONFIRM_INTERVAL).await;
            let pods = self.cache.update(|stores| stores.pods.unconfirmed());
            for key in pods {
                if let Err(why) = self.get_pod(&key, Instant::now() + GET_TIMEOUT).await {
                    tracing::debug!(
                        pod = format!("{}/{}", key.0, key.1),
                        why,
                        "Could not confirm the pod"
                    );
                }
            }
        }
    }

    /// Repeats a request if the server's `Retry-After` ends within the timeout of one GET. The wait does not shorten
    /// the repeated request's timeout.
    async fn request<T, F>(&self, ask: impl Fn() -> F, until: Instant) -> Result<Option<T>, String>
    where
        F: Future<Output = kube::Result<Option<T>>>,
    {
        let retry_until = until.min(Instant::now() + GET_TIMEOUT);
        let mut refusal = "the API server refused another request".to_owned();
        loop {
            let delay = self.retry_after.remaining();
            if !delay.is_zero() && Instant::now() + delay >= retry_until {
                let seconds = delay.as_secs_f32();
                return Err(format!("{refusal}; it asks to wait {seconds:.1} s more"));
            }
            sleep(delay).await;
            match timeout_at(until.min(Instant::now() + GET_TIMEOUT), ask()).await {
                Ok(Err(error)) if !self.retry_after.remaining().is_zero() => {
                    refusal = inpod_kube::describe_error(&error);
                }
                Ok(answer) => return answer.map_err(|error| inpod_kube::describe_error(&error)),
                Err(_) => return Err("the API server does not answer in time".to_owned()),
            }
        }
    }
}
