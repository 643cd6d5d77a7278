use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};
use tokio::sync::watch;

/// The named conditions of a service, cheap to clone. Readiness depends on the required conditions.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    conditions: Mutex<BTreeMap<&'static str, Condition>>,
    ready: watch::Sender<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub ok: bool,
    /// The time of the last change of `ok`.
    pub since: SystemTime,
    /// The problem, or an empty text if the condition is met.
    pub message: String,
    /// True if the readiness of the service depends on this condition.
    pub required: bool,
}

impl Default for Readiness {
    /// Starts as ready, without conditions.
    fn default() -> Self {
        Self(Arc::new(Inner {
            conditions: Mutex::default(),
            ready: watch::Sender::new(true),
        }))
    }
}

impl Readiness {
    /// Declares a required condition, initially not met; called before the service is served.
    pub fn require(&self, name: &'static str, message: &str) {
        self.put(name, Err(message.to_owned()), true);
    }

    pub fn set(&self, name: &'static str, result: Result<(), String>) {
        self.put(name, result, false);
    }

    fn put(&self, name: &'static str, result: Result<(), String>, required: bool) {
        let (ok, message) =
            result.map_or_else(|message| (false, message), |()| (true, String::new()));
        let mut all = self.lock();
        let known = all.get(name);
        let required = required || known.is_some_and(|known| known.required);
        let since = match known {
            Some(known) if known.ok == ok => known.since,
            Some(_) | None => {
                tracing::info!(condition = name, ok, why = message, "Condition changed");
                SystemTime::now()
            }
        };
        let condition = Condition {
            ok,
            since,
            message,
            required,
        };
        all.insert(name, condition);
        // The lock is still held, so that the last update belongs to the last state.
        let ready = all
            .values()
            .all(|condition| condition.ok || !condition.required);
        self.0
            .ready
            .send_if_modified(|was| std::mem::replace(was, ready) != ready);
    }

    pub fn all(&self) -> BTreeMap<&'static str, Condition> {
        self.lock().clone()
    }

    /// Returns a line for each required condition that is not met.
    pub(crate) fn unmet(&self) -> String {
        let all = self.lock();
        let unmet = all.iter().filter(|(_, it)| it.required && !it.ok);
        unmet
            .map(|(name, it)| format!("{name}: {}\n", it.message))
            .collect()
    }

    pub fn is_ready(&self) -> bool {
        *self.0.ready.borrow()
    }

    /// Returns a receiver of changes of [`Self::is_ready`].
    pub fn changes(&self) -> watch::Receiver<bool> {
        self.0.ready.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Condition>> {
        self.0
            .conditions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Readiness {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let ready = ConstGauge::new(i64::from(self.is_ready()));
        let help = "Whether all required conditions are met.";
        ready.encode(encoder.encode_descriptor("ready", help, None, MetricType::Gauge)?)?;
        let all = self.all();
        if all.is_empty() {
            return Ok(());
        }
        let help = "Whether a condition is met.";
        let mut family = encoder.encode_descriptor("condition", help, None, MetricType::Gauge)?;
        for (name, condition) in all {
            let value = ConstGauge::new(i64::from(condition.ok));
            value.encode(family.encode_family(&[("name", name)])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away() -> Result<(), String> {
        Err("it is away".to_owned())
    }

    #[test]
    fn a_service_that_requires_nothing_is_ready() {
        let readiness = Readiness::default();
        assert!(readiness.is_ready());
        readiness.set("ztunnel", away());
        assert!(readiness.is_ready(), "a condition that is not required");
    }

    #[test]
    fn a_required_condition_holds_readiness_up_until_it_is_met_and_whenever_it_is_lost() {
        let readiness = Readiness::default();
        readiness.require("netconfig", "not seen yet");
        let mut changes = readiness.changes();
        assert!(!*changes.borrow_and_update());
        readiness.set("netconfig", Ok(()));
        assert!(changes.has_changed().unwrap() && *changes.borrow_and_update());
        readiness.set("netconfig", Ok(()));
        assert!(!changes.has_changed().unwrap(), "nothing has changed");
        readiness.set("netconfig", away());
        assert!(!readiness.is_ready());
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_turns_and_its_message_is_the_last_one() {
        let readiness = Readiness::default();
        readiness.set("ztunnel", away());
        let first = readiness.all()["ztunnel"].clone();
        readiness.set("ztunnel", Err("still away".to_owned()));
        let second = readiness.all()["ztunnel"].clone();
        assert_eq!(
            (second.since, second.message.as_str()),
            (first.since, "still away")
        );
        readiness.set("ztunnel", Ok(()));
        let met = readiness.all()["ztunnel"].clone();
        assert!(met.ok && met.message.is_empty() && met.since >= first.since);
    }
}
