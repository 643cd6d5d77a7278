use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::grpc::{LIVE, REASONS};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Asks for readiness, on behalf of readiness probes and people.
    Ready,
    /// Asks for liveness, on behalf of the kubelet's liveness probes.
    Live,
}

/// Asks a running service for its health, over the gRPC socket.
pub(crate) async fn check(
    run_dir: &Path,
    component: &str,
    question: Question,
) -> anyhow::Result<()> {
    let socket = crate::socket(run_dir, component);
    let mut client = HealthClient::new(crate::channel(&socket));
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: match question {
            Question::Ready => String::new(),
            Question::Live => LIVE.to_owned(),
        },
    });
    request.set_timeout(Duration::from_secs(2));
    let answer = tokio::time::timeout(Duration::from_secs(3), client.check(request));
    let answer = answer.await.context("no answer within 3 s");
    let status = answer.and_then(|answer| answer.context("the call failed"));
    let answer = status.with_context(|| format!("cannot ask {}", socket.display()))?;
    let reasons = answer.metadata().get_bin(REASONS);
    let reasons = reasons
        .and_then(|reasons| reasons.to_bytes().ok())
        .unwrap_or_default();
    let status = answer.into_inner().status();
    if status != ServingStatus::Serving {
        let reasons = String::from_utf8_lossy(&reasons);
        bail!(describe(component, question, status, reasons.trim_end()));
    }
    Ok(())
}

fn describe(name: &str, question: Question, status: ServingStatus, reasons: &str) -> String {
    let status = status.as_str_name();
    match question {
        Question::Ready if reasons.is_empty() => format!("{name} is not ready: {status}"),
        Question::Ready => format!("{name} is not ready: {reasons}"),
        Question::Live => format!("{name} is not live: {status}; see its log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_liveness_check_does_not_mention_readiness() {
        let text = |question| {
            describe(
                "netconfig",
                question,
                ServingStatus::NotServing,
                "chain: away",
            )
        };
        assert_eq!(
            text(Question::Live),
            "netconfig is not live: NOT_SERVING; see its log"
        );
        assert_eq!(text(Question::Ready), "netconfig is not ready: chain: away");
    }
}
