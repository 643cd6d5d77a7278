//! Detects from the status of a pod that the pod started without redirection. Criteria and settings are those of
//! Istio's repair controller (services/docs/facts/istio-sidecar.md, 5).

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Criteria {
    /// The annotation that the pod must have, with any value; `None` accepts every pod.
    pub annotation: Option<String>,
    /// The name of the init container; `None` accepts any name.
    pub container: Option<String>,
    /// The termination message without surrounding whitespace; `None` accepts any message.
    pub message: Option<String>,
    pub exit_code: Option<i32>,
}

/// An init container that failed because redirection was missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedInit {
    pub container: String,
    pub exit_code: i32,
    /// The termination message, which may have many lines.
    pub message: String,
    /// The start of the last failed run, with a resolution of one second.
    pub started_at: Option<SystemTime>,
}

impl Criteria {
    pub fn find(&self, pod: &Pod) -> Option<FailedInit> {
        let annotations = pod.metadata.annotations.as_ref();
        let has = |name: &String| annotations.is_some_and(|all| all.contains_key(name));
        if !self.annotation.as_ref().is_none_or(has) {
            return None;
        }
        let status = pod.status.as_ref()?;
        let containers = status.init_container_statuses.iter().flatten();
        containers
            .into_iter()
            .find_map(|status| self.failed(status))
    }

    fn failed(&self, status: &ContainerStatus) -> Option<FailedInit> {
        let is_meant = self
            .container
            .as_ref()
            .is_none_or(|name| *name == status.name);
        let now = status
            .state
            .as_ref()
            .and_then(|state| state.terminated.as_ref());
        let last = status.last_state.as_ref()?.terminated.as_ref()?;
        let message = last.message.as_deref().unwrap_or_default().trim();
        let is_so = is_meant
            && !now.is_some_and(has_passed)
            && self.message.as_ref().is_none_or(|wanted| wanted == message)
            && self.exit_code.is_none_or(|wanted| wanted == last.exit_code);
        is_so.then(|| FailedInit {
            container: status.name.clone(),
            exit_code: last.exit_code,
            message: message.to_owned(),
            started_at: last
                .started_at
                .as_ref()
                .and_then(|time| since_1970(time.0.as_second())),
        })
    }
}

/// Returns whether the current run has succeeded. Like Istio, accepts either the reason or the exit code as a sign.
fn has_passed(now: &ContainerStateTerminated) -> bool {
    now.reason.as_deref() == Some("Completed") || now.exit_code == 0
}

fn since_1970(seconds: i64) -> Option<SystemTime> {
    let since = Duration::from_secs(u64::try_from(seconds).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(since)
}

#[cfg(test)]
mod tests;
