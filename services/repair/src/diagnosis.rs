//! Combines the status and the enrollment of a pod into a diagnosis.

use std::time::{Duration, SystemTime};

use crate::{
    detect::FailedInit,
    enrollment_status::{EnrollmentStatus, Progress, Redirection},
};

/// Container times have a resolution of one second, and the kubelet uses the node's clock. A run that began at least
/// this long after the rules were applied had the rules from its start.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Diagnosis {
    /// The pod lacks nothing; true if pod-events reports the pod as redirected.
    Healthy(bool),
    /// The state is unknown at the moment, so the earlier diagnosis stays.
    Unknown,
    /// The init container failed, but redirection is present since then: the next run of the container will pass.
    Repaired,
    /// The pod lacks redirection, which may still come.
    Missing(MissingRedirection),
    /// The pod will not be redirected in its current state.
    Permanent(PermanentFailure),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRedirection {
    /// An init container has failed because of the missing redirection, so the pod does not serve.
    pub has_failed: bool,
    /// The traffic bypasses a proxy in the pod. If false, the traffic bypasses the node's ztunnel, which often affects
    /// all pods of the node at once.
    pub has_proxy: bool,
    /// pod-events works on the pod, so a replacement would fare no worse.
    pub is_known: bool,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PermanentFailure {
    /// The init container failed again although redirection was present. A replacement of the pod may fare better.
    FailedAgain(String),
    /// Neither the pod nor a replacement is to be redirected.
    NotDesired(String),
}

/// Diagnoses a pod that has not ended and is not being deleted.
pub fn diagnose(failed_init: Option<&FailedInit>, status: &EnrollmentStatus) -> Diagnosis {
    match failed_init {
        Some(failed_init) => diagnose_failed(failed_init, status),
        None => diagnose_running(status),
    }
}

fn diagnose_running(status: &EnrollmentStatus) -> Diagnosis {
    match status {
        EnrollmentStatus::Unavailable
        | EnrollmentStatus::UnknownPod
        | EnrollmentStatus::Undecided => Diagnosis::Unknown,
        EnrollmentStatus::NotDesired(_) => Diagnosis::Healthy(false),
        EnrollmentStatus::Desired(Redirection {
            has_proxy,
            progress,
        }) => match progress {
            Progress::Redirected(_) => Diagnosis::Healthy(true),
            Progress::Leaving => Diagnosis::Healthy(false),
            Progress::Pending(why) => Diagnosis::Missing(MissingRedirection {
                has_failed: false,
                has_proxy: *has_proxy,
                is_known: true,
                why: describe_pending(why),
            }),
        },
    }
}

fn diagnose_failed(failed_init: &FailedInit, status: &EnrollmentStatus) -> Diagnosis {
    let missing = |is_known: bool, why: String| {
        Diagnosis::Missing(MissingRedirection {
            has_failed: true,
            has_proxy: true,
            is_known,
            why,
        })
    };
    match status {
        EnrollmentStatus::Unavailable => missing(false, "pod-events is not available".to_owned()),
        EnrollmentStatus::UnknownPod => {
            missing(false, "pod-events does not know the pod".to_owned())
        }
        EnrollmentStatus::Undecided => missing(
            false,
            "pod-events has not decided whether the pod is to be redirected".to_owned(),
        ),
        EnrollmentStatus::NotDesired(reason) => {
            let why = format!(
                "pod-events does not redirect the pod ({reason}). {}",
                reason.remedy()
            );
            Diagnosis::Permanent(PermanentFailure::NotDesired(why))
        }
        EnrollmentStatus::Desired(Redirection { progress, .. }) => match progress {
            Progress::Redirected(since) if has_failed_since(failed_init, *since) => {
                let FailedInit {
                    container, message, ..
                } = failed_init;
                let why = format!(
                    "{container} failed again although the pod is redirected: {}",
                    first_line(message)
                );
                Diagnosis::Permanent(PermanentFailure::FailedAgain(why))
            }
            Progress::Redirected(_) => Diagnosis::Repaired,
            Progress::Leaving => Diagnosis::Unknown,
            Progress::Pending(why) => missing(true, describe_pending(why)),
        },
    }
}

fn has_failed_since(failed_init: &FailedInit, since: Option<SystemTime>) -> bool {
    let (Some(began), Some(since)) = (failed_init.started_at, since) else {
        return false;
    };
    began
        .duration_since(since)
        .is_ok_and(|later| later >= CLOCK_TOLERANCE)
}

fn describe_pending(failure: &str) -> String {
    if failure.is_empty() {
        "pod-events has not redirected it yet".to_owned()
    } else {
        format!("pod-events could not redirect it: {failure}")
    }
}

/// Returns the first line of the message, shortened for an Event.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let short: String = line.chars().take(200).collect();
    if short.is_empty() {
        "no message".to_owned()
    } else {
        short
    }
}

#[cfg(test)]
mod tests {
    use inpod_types::Reason;

    use super::*;

    fn at(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(second)
    }

    fn failed(second: u64) -> FailedInit {
        FailedInit {
            container: "istio-validation".to_owned(),
            exit_code: 126,
            message: "IPv6 is not redirected\nsecond line".to_owned(),
            started_at: Some(at(second)),
        }
    }

    fn wanted(has_proxy: bool, progress: Progress) -> EnrollmentStatus {
        EnrollmentStatus::Desired(Redirection {
            has_proxy,
            progress,
        })
    }

    fn name(diagnosis: &Diagnosis) -> &'static str {
        match diagnosis {
            Diagnosis::Healthy(true) => "redirected",
            Diagnosis::Healthy(false) => "well",
            Diagnosis::Unknown => "unsure",
            Diagnosis::Repaired => "mended",
            Diagnosis::Missing(MissingRedirection {
                has_failed: true,
                is_known: true,
                ..
            }) => "failed, may come",
            Diagnosis::Missing(MissingRedirection {
                has_failed: true,
                is_known: false,
                ..
            }) => "failed, who knows",
            Diagnosis::Missing(MissingRedirection {
                has_proxy: true, ..
            }) => "runs without its proxy",
            Diagnosis::Missing(_) => "runs without ztunnel",
            Diagnosis::Permanent(PermanentFailure::FailedAgain(_)) => "failed again",
            Diagnosis::Permanent(PermanentFailure::NotDesired(_)) => "unwanted",
        }
    }

    #[test]
    fn every_pair_of_a_pod_status_and_an_enrollment_has_its_diagnosis() {
        let out = || Progress::Pending("the kernel refused".to_owned());
        let rows = [
            // Each row has the status, and the diagnoses of a running pod and of a pod whose container failed at second
            // 100.
            (EnrollmentStatus::Unavailable, "unsure", "failed, who knows"),
            (EnrollmentStatus::UnknownPod, "unsure", "failed, who knows"),
            (EnrollmentStatus::Undecided, "unsure", "failed, who knows"),
            (
                EnrollmentStatus::NotDesired(Reason::NotSelected),
                "well",
                "unwanted",
            ),
            (
                wanted(true, out()),
                "runs without its proxy",
                "failed, may come",
            ),
            (
                wanted(false, out()),
                "runs without ztunnel",
                "failed, may come",
            ),
            (wanted(true, Progress::Leaving), "well", "unsure"),
            (
                wanted(true, Progress::Redirected(None)),
                "redirected",
                "mended",
            ),
            (
                wanted(true, Progress::Redirected(Some(at(101)))),
                "redirected",
                "mended",
            ),
            (
                wanted(true, Progress::Redirected(Some(at(99)))),
                "redirected",
                "mended",
            ),
            (
                wanted(true, Progress::Redirected(Some(at(98)))),
                "redirected",
                "failed again",
            ),
        ];
        for (status, when_running, when_failed) in rows {
            assert_eq!(name(&diagnose(None, &status)), when_running, "{status:?}");
            assert_eq!(
                name(&diagnose(Some(&failed(100)), &status)),
                when_failed,
                "{status:?}"
            );
        }
    }

    #[test]
    fn a_container_without_a_start_time_has_not_failed_again() {
        let mut failed_init = failed(100);
        failed_init.started_at = None;
        let status = wanted(true, Progress::Redirected(Some(at(0))));
        assert_eq!(diagnose(Some(&failed_init), &status), Diagnosis::Repaired);
    }

    #[test]
    fn the_reason_contains_the_message_of_its_source() {
        let why = |diagnosis: Diagnosis| match diagnosis {
            Diagnosis::Missing(lack) => lack.why,
            Diagnosis::Permanent(
                PermanentFailure::FailedAgain(why) | PermanentFailure::NotDesired(why),
            ) => why,
            Diagnosis::Healthy(_) | Diagnosis::Unknown | Diagnosis::Repaired => String::new(),
        };
        let of = |status: &EnrollmentStatus| why(diagnose(Some(&failed(100)), status));
        assert!(of(&wanted(true, Progress::Pending("no table".to_owned()))).contains("no table"));
        assert!(
            of(&wanted(true, Progress::Pending(String::new()))).contains("not redirected it yet")
        );
        let again = of(&wanted(true, Progress::Redirected(Some(at(1)))));
        assert!(
            again.contains("IPv6") && !again.contains("second line"),
            "{again}"
        );
        let unwanted = of(&EnrollmentStatus::NotDesired(Reason::NamespaceExcluded));
        assert!(
            unwanted.contains("NAMESPACE_EXCLUDED") && unwanted.contains("excludeNamespaces"),
            "{unwanted}"
        );
    }
}
