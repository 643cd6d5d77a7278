//! The levels of the log. An operator changes levels for a time while the service runs.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inpod_types::{Failure, Reason};
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep_until},
};
use tracing::Level;
use tracing_subscriber::{
    Registry,
    filter::{LevelFilter, Targets},
    reload,
};

/// Libraries limited to `warn`, because of the size of their debug output.
const WARN_ONLY_LIBRARIES: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "kube"];

/// The module of kube that logs each failed request as an error. A service reports the failure itself, once, as a
/// condition and a warning, so these lines are only for debugging.
const CLIENT_OF_KUBERNETES: &str = "kube_client::client::builder";

/// The maximum number of scopes at another level, since the filter compares an event's module with every scope.
const MAX_SCOPES: usize = 32;

/// The filter of the log, whose levels [`Levels`] changes.
pub(crate) type Filter = reload::Layer<Targets, Registry>;

/// The levels in force.
#[derive(Debug)]
pub(crate) struct Levels {
    default: Level,
    filter: reload::Handle<Targets, Registry>,
    scopes: Mutex<BTreeMap<String, Temporary>>,
}

/// A level with an end.
#[derive(Debug)]
struct Temporary {
    level: Level,
    until: Instant,
    end: AbortHandle,
}

/// A scope, its level and the time until the level ends.
pub(crate) type Scope = (String, Level, Duration);

impl Levels {
    pub(crate) fn new(default: Level) -> (Arc<Self>, Filter) {
        let (layer, filter) = reload::Layer::new(targets(default, &[]));
        let levels = Self {
            default,
            filter,
            scopes: Mutex::default(),
        };
        (Arc::new(levels), layer)
    }

    pub(crate) fn default_level(&self) -> Level {
        self.default
    }

    pub(crate) fn scopes(&self) -> Vec<Scope> {
        let now = Instant::now();
        let list = |(scope, it): (&String, &Temporary)| {
            let remaining = it.until.saturating_duration_since(now);
            (scope.clone(), it.level, remaining)
        };
        self.lock().iter().map(list).collect()
    }

    /// Logs a scope at a level until the duration is over; an empty scope is the whole service.
    ///
    /// # Errors
    ///
    /// Fails if the level is below the default, or if too many other scopes are at another level.
    pub(crate) fn set(
        self: &Arc<Self>,
        scope: &str,
        level: Level,
        duration: Duration,
    ) -> Result<(), Failure> {
        if level < self.default {
            let message = format!(
                "the level {level} is below the setting log_level ({}), and a call only adds lines",
                self.default
            );
            return Err(Failure::new(Reason::InvalidField, message).at_field("level"));
        }
        let mut scopes = self.lock();
        if scopes.len() >= MAX_SCOPES && !scopes.contains_key(scope) {
            let message = format!("{MAX_SCOPES} other scopes are at another level");
            return Err(Failure::new(Reason::Overloaded, message));
        }
        let until = Instant::now() + duration;
        let (levels, name) = (Arc::clone(self), scope.to_owned());
        let end = tokio::spawn(async move {
            sleep_until(until).await;
            levels.end(&name);
        });
        let temporary = Temporary {
            level,
            until,
            end: end.abort_handle(),
        };
        if let Some(replaced) = scopes.insert(scope.to_owned(), temporary) {
            replaced.end.abort();
        }
        self.apply(&scopes);
        tracing::info!(scope, %level, ?duration, "A scope is logged at another level");
        Ok(())
    }

    /// Logs a scope at the default level again.
    pub(crate) fn end(&self, scope: &str) {
        let mut scopes = self.lock();
        let Some(ended) = scopes.remove(scope) else {
            return;
        };
        ended.end.abort();
        self.apply(&scopes);
        tracing::info!(scope, level = %self.default, "A scope is logged at the default level again");
    }

    fn apply(&self, scopes: &BTreeMap<String, Temporary>) {
        let scopes: Vec<_> = scopes
            .iter()
            .map(|(scope, it)| (scope.as_str(), it.level))
            .collect();
        if let Err(error) = self.filter.reload(targets(self.default, &scopes)) {
            tracing::error!(%error, "Cannot change the level of the log");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Temporary>> {
        self.scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Builds the filter: the longest prefix of a module's path decides.
fn targets(default: Level, scopes: &[(&str, Level)]) -> Targets {
    let whole = scopes.iter().find(|(scope, _)| scope.is_empty());
    let level = whole.map_or(default, |(_, level)| *level);
    let failed_requests = if level >= Level::DEBUG {
        LevelFilter::ERROR
    } else {
        LevelFilter::OFF
    };
    let modules = scopes.iter().filter(|(scope, _)| !scope.is_empty());
    Targets::new()
        .with_default(level)
        .with_targets(WARN_ONLY_LIBRARIES.map(|name| (name, default.min(Level::WARN))))
        .with_target(CLIENT_OF_KUBERNETES, failed_requests)
        .with_targets(modules.copied())
}

#[cfg(test)]
mod tests {
    use tracing::{Level, subscriber::with_default};
    use tracing_subscriber::{layer::SubscriberExt as _, registry};

    use super::*;

    /// Returns whether the debug lines of two modules and a library are logged.
    fn logged(filter: Filter, then: impl FnOnce()) -> [bool; 3] {
        with_default(registry().with(filter), || {
            then();
            [
                tracing::enabled!(target: "pod_events::tasks::task", Level::DEBUG),
                tracing::enabled!(target: "pod_events::source", Level::DEBUG),
                tracing::enabled!(target: "kube::client", Level::DEBUG),
            ]
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_scope_has_its_submodules_and_ends_with_its_time() {
        for (scope, expected) in [
            ("pod_events::tasks", [true, false, false]),
            ("pod_events", [true, true, false]),
            ("", [true, true, false]),
            ("kube", [false, false, true]),
        ] {
            let (levels, filter) = Levels::new(Level::INFO);
            let minute = Duration::from_secs(60);
            levels.set(scope, Level::DEBUG, minute).unwrap();
            assert_eq!(logged(filter, || ()), expected, "{scope}");
            assert_eq!(levels.scopes(), [(scope.to_owned(), Level::DEBUG, minute)]);
            tokio::time::sleep(minute + Duration::from_secs(1)).await;
            assert_eq!(levels.scopes(), []);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_requests_of_kube_are_logged_only_on_demand() {
        let is_logged = |filter| {
            with_default(
                registry().with(filter),
                || tracing::enabled!(target: "kube_client::client::builder", Level::ERROR),
            )
        };
        for (default, expected) in [
            (Level::WARN, false),
            (Level::INFO, false),
            (Level::DEBUG, true),
        ] {
            let (_levels, filter) = Levels::new(default);
            assert_eq!(is_logged(filter), expected, "{default}");
        }
        for scope in ["", "kube_client::client::builder"] {
            let (levels, filter) = Levels::new(Level::INFO);
            let minute = Duration::from_secs(60);
            levels.set(scope, Level::DEBUG, minute).unwrap();
            assert!(is_logged(filter), "{scope}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_level_of_a_scope_replaces_level_and_time() {
        let (levels, filter) = Levels::new(Level::INFO);
        let set = |level, seconds| {
            let duration = Duration::from_secs(seconds);
            levels.set("pod_events", level, duration).unwrap();
        };
        set(Level::DEBUG, 10);
        set(Level::TRACE, 100);
        tokio::time::sleep(Duration::from_secs(50)).await;
        let left = Duration::from_secs(50);
        assert_eq!(
            levels.scopes(),
            [("pod_events".to_owned(), Level::TRACE, left)]
        );
        let after_end = logged(filter, || levels.end("pod_events"));
        assert_eq!((levels.scopes(), after_end), (vec![], [false; 3]));
    }

    #[tokio::test]
    async fn a_level_below_the_default_and_too_many_scopes_are_refused() {
        let (levels, _filter) = Levels::new(Level::INFO);
        let set = |scope: &str, level| levels.set(scope, level, Duration::from_secs(60));
        assert_eq!(set("a", Level::WARN).unwrap_err().field, "level");
        for number in 0..MAX_SCOPES {
            set(&format!("m{number}"), Level::DEBUG).unwrap();
        }
        let refused = set("a", Level::DEBUG).unwrap_err();
        assert_eq!(refused.reason, Reason::Overloaded);
        set("m1", Level::TRACE).unwrap();
    }
}
