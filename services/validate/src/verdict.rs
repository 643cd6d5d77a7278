//! Turns the results of the probes into an exit code and one line of text.

use std::{fmt::Write as _, time::Duration};

use crate::{
    arguments::{Settings, UsageError},
    probe::{Observed, Outcome, ProbeResult},
};

/// The exit codes. istio-iptables uses 126, too, and `repair` looks for 126.
const REDIRECTED: u8 = 0;
const MISSING: u8 = 126;
const UNKNOWN: u8 = 1;
const USAGE: u8 = 2;

const REMEDY: &str = "the CNI plugin did not redirect this pod when it started, or this container does not run as the \
                      proxy's user; inpod redirects a running pod where it can (see inpod explain on the node); \
                      otherwise recreate the pod";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub code: u8,
    /// One line with the tried connections, the observation and the remedy.
    pub line: String,
}

impl Verdict {
    pub fn usage(error: &UsageError) -> Self {
        Self::of(USAGE, &format!("invalid arguments: {error}"))
    }

    pub fn unknown(why: &str) -> Self {
        Self::of(
            UNKNOWN,
            &format!("not known whether this pod is redirected: {why}"),
        )
    }

    fn of(code: u8, text: &str) -> Self {
        // Messages may contain line breaks, but the report is a single line.
        let line = format!("validate: {text}").replace(['\n', '\r'], " ");
        Self { code, line }
    }
}

/// Evaluates the results of the probes, made as user `uid`.
pub fn evaluate(found: &[ProbeResult], settings: &Settings, uid: u32) -> Verdict {
    let mut families = String::new();
    for one in found {
        let ProbeResult { target, outcome } = one;
        let address = target.socket_addr(settings.ports.probe);
        let separator = if families.is_empty() { "" } else { "; " };
        write!(
            families,
            "{separator}{}: {}",
            target.family,
            describe(outcome, &address.to_string())
        )
        .unwrap_or_default();
    }
    let is = |wanted: fn(&Outcome) -> bool| found.iter().any(|one| wanted(&one.outcome));
    if is(|outcome| matches!(outcome, Outcome::Missing(_))) {
        let tried = seconds(settings.timeout);
        return Verdict::of(
            MISSING,
            &format!(
                "this pod is not redirected ({families}), tried as uid {uid} for {tried}: {REMEDY}"
            ),
        );
    }
    if is(|outcome| matches!(outcome, Outcome::Unknown(_))) {
        return Verdict::unknown(&format!("{families}, tried as uid {uid}"));
    }
    Verdict::of(
        REDIRECTED,
        &format!("this pod is redirected ({families}), tried as uid {uid}"),
    )
}

fn describe(outcome: &Outcome, target: &str) -> String {
    match outcome {
        Outcome::Proven(port) => format!("a connection to {target} arrived at port {port}"),
        Outcome::Missing(Observed::Refused) => format!("a connection to {target} was refused"),
        Outcome::Missing(Observed::Silence) => format!("a connection to {target} was not answered"),
        Outcome::Missing(Observed::Answered) => {
            format!(
                "a connection to {target} was accepted by another listener than the proxy's ports"
            )
        }
        Outcome::Missing(Observed::Failed(why)) => format!("cannot connect to {target}: {why}"),
        Outcome::Unknown(why) => why.clone(),
    }
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::{
        arguments::Ports,
        probe_target::{Families, Family, ProbeTarget},
    };

    fn judged(outcomes: &[(Family, &str, Outcome)]) -> Verdict {
        let settings = Settings {
            timeout: Duration::from_millis(2500),
            families: Families::Auto,
            ports: Ports {
                inbound: 15006,
                outbound: 15001,
                probe: 15002,
            },
        };
        let found = |(family, address, outcome): &(Family, &str, Outcome)| ProbeResult {
            target: ProbeTarget {
                family: *family,
                address: address.parse::<IpAddr>().unwrap(),
            },
            outcome: outcome.clone(),
        };
        let found: Vec<_> = outcomes.iter().map(found).collect();
        evaluate(&found, &settings, 1337)
    }

    #[test]
    fn a_family_that_is_missing_is_reported_beside_one_that_is_not() {
        let proven = (Family::V4, "127.0.0.6", Outcome::Proven(15006));
        let missing = (Family::V6, "::6", Outcome::Missing(Observed::Refused));
        let verdict = judged(&[proven.clone(), missing]);
        assert_eq!(verdict.code, 126);
        for text in [
            "IPv4: a connection to 127.0.0.6:15002 arrived",
            "IPv6: a connection to [::6]:15002 was refused",
            "uid 1337 for 2.5 s",
            "recreate the pod",
        ] {
            assert!(verdict.line.contains(text), "{text}: {}", verdict.line);
        }
        assert_eq!(judged(&[proven]).code, 0);
    }

    #[test]
    fn what_is_missing_counts_more_than_what_is_not_known() {
        let unknown = (Family::V4, "127.0.0.6", Outcome::Unknown("no".to_owned()));
        let missing = (Family::V6, "::6", Outcome::Missing(Observed::Answered));
        assert_eq!(judged(std::slice::from_ref(&unknown)).code, 1);
        assert_eq!(judged(&[unknown, missing]).code, 126);
    }

    #[test]
    fn a_verdict_is_one_line() {
        let odd = Observed::Failed("a\nb\r\nc".to_owned());
        let verdict = judged(&[(Family::V4, "127.0.0.6", Outcome::Missing(odd))]);
        assert!(!verdict.line.contains(['\n', '\r']), "{}", verdict.line);
        assert!(verdict.line.len() < 1024);
    }
}
