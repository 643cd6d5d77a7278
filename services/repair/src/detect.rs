//! Whether a pod's status shows that it started without redirection: the test of Istio's repair controller
//! (istio-sidecar-install, section 5), by the same settings.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};

/// By what it shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Criteria {
    /// The annotation that it has to have, whatever it holds; `None`: it need have none.
    pub annotation: Option<String>,
    /// The init container that failed; `None`: any.
    pub container: Option<String>,
    /// Its last words, without blanks around them; `None`: any.
    pub message: Option<String>,
    /// Its exit code; `None`: any.
    pub exit_code: Option<i32>,
}

/// An init container that failed for want of redirection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedInit {
    /// Its name.
    pub container: String,
    /// Its exit code.
    pub exit_code: i32,
    /// Its last words, which may be many.
    pub message: String,
    /// When the run began that failed last, to the second; `None` where nobody says.
    pub started_at: Option<SystemTime>,
}

impl Criteria {
    /// The first init container that failed so.
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

/// Whether the run that is over now did what it was for. Istio takes either sign for it.
fn has_passed(now: &ContainerStateTerminated) -> bool {
    now.reason.as_deref() == Some("Completed") || now.exit_code == 0
}

fn since_1970(seconds: i64) -> Option<SystemTime> {
    let since = Duration::from_secs(u64::try_from(seconds).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(since)
}

#[cfg(test)]
mod tests;
