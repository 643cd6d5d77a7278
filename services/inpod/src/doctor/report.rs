use std::fmt::Write as _;

use inpod_service::escape_controls;
use serde_json::{Value, json};

use super::{check::Check, codes::Verdict};
use crate::table::Table;

/// Renders the worst verdicts last, where a terminal shows them, and problems with their remedy. Checks that passed are
/// only counted, unless `is_verbose`.
pub(super) fn text(checks: &[Check], is_verbose: bool, has_colour: bool) -> String {
    let of = |verdict| checks.iter().filter(move |check| check.verdict == verdict);
    let mut text = String::new();
    if is_verbose {
        let mut table = Table::new(&["OK", "OF", "FOUND"]);
        for check in of(Verdict::Ok) {
            let name = check.code.name().to_owned();
            table.push([name, check.subject.clone(), check.found.clone()]);
        }
        text = table.take() + "\n";
    }
    for verdict in [Verdict::Unknown, Verdict::Warning, Verdict::Failed] {
        for check in of(verdict) {
            let (name, found) = (named(check), escape_controls(&check.found));
            let verdict_shown = painted(verdict, has_colour);
            writeln!(text, "{verdict_shown}{name}: {found}").unwrap_or_default();
            if verdict != Verdict::Unknown {
                writeln!(text, "        What to do: {}", check.code.remedy()).unwrap_or_default();
            }
        }
    }
    text + &summary(checks)
}

/// Returns the verdict padded to its column, in the colour of a terminal (ECMA-48, SGR) if wanted.
fn painted(verdict: Verdict, has_colour: bool) -> String {
    let padded = format!("{:8}", verdict.as_str());
    match verdict {
        Verdict::Failed if has_colour => format!("\u{1b}[31m{padded}\u{1b}[0m"),
        Verdict::Warning if has_colour => format!("\u{1b}[33m{padded}\u{1b}[0m"),
        Verdict::Ok | Verdict::Unknown | Verdict::Warning | Verdict::Failed => padded,
    }
}

fn named(check: &Check) -> String {
    if check.subject.is_empty() {
        return check.code.to_string();
    }
    format!("{} ({})", check.code, escape_controls(&check.subject))
}

fn count(checks: &[Check], verdict: Verdict) -> usize {
    checks
        .iter()
        .filter(|check| check.verdict == verdict)
        .count()
}

fn summary(checks: &[Check]) -> String {
    let of = |verdict| count(checks, verdict);
    format!(
        "{} failed, {} warnings, {} unknown, {} ok\n",
        of(Verdict::Failed),
        of(Verdict::Warning),
        of(Verdict::Unknown),
        of(Verdict::Ok)
    )
}

/// Renders the checks as JSON, together with the version of this program.
pub(super) fn json(checks: &[Check]) -> String {
    format!("{:#}", value(checks))
}

pub(super) fn value(checks: &[Check]) -> Value {
    let check = |check: &Check| {
        json!({
            "code": check.code.name(),
            "subject": check.subject,
            "verdict": check.verdict.as_str(),
            "found": check.found,
            "remedy": check.code.remedy(),
        })
    };
    let checks_shown: Vec<_> = checks.iter().map(check).collect();
    json!({
        "version": inpod_types::VERSION,
        "failed": count(checks, Verdict::Failed),
        "warnings": count(checks, Verdict::Warning),
        "unknown": count(checks, Verdict::Unknown),
        "checks": checks_shown,
    })
}

#[cfg(test)]
mod tests {
    use super::{super::codes::Code, *};

    fn checks() -> [Check; 3] {
        [
            Check::ok(Code::KernelTooOld, "", "Linux 6.1"),
            Check::unknown(Code::SelfTestFailed, "", "not run"),
            Check::problem(Code::SocketOpen, "netconfig", "its mode\u{1b}[2J"),
        ]
    }

    #[test]
    fn failures_come_last_with_their_remedy() {
        let text = text(&checks(), false, false);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "unknown SELF_TEST_FAILED: not run");
        let failed = "failed  SOCKET_OPEN (netconfig): its mode\\u{1b}[2J";
        assert_eq!(lines[1], failed);
        assert!(
            lines[2].contains("What to do: Restart the service"),
            "{text}"
        );
        assert_eq!(lines[3], "1 failed, 0 warnings, 1 unknown, 1 ok");
    }

    #[test]
    fn passed_checks_and_colours_appear_on_request() {
        let text = text(&checks(), true, true);
        assert!(text.contains("KERNEL_TOO_OLD  -   Linux 6.1"), "{text}");
        assert!(
            text.contains("\u{1b}[31mfailed  \u{1b}[0mSOCKET_OPEN"),
            "{text}"
        );
    }

    #[test]
    fn json_has_every_check_with_code_and_remedy() {
        let value: Value = serde_json::from_str(&json(&checks())).unwrap();
        assert_eq!(value["failed"], 1);
        let last = &value["checks"][2];
        assert_eq!(
            (&last["code"], &last["verdict"]),
            (&"SOCKET_OPEN".into(), &"failed".into())
        );
        assert!(
            value["checks"]
                .as_array()
                .unwrap()
                .iter()
                .all(|it| it["remedy"] != "")
        );
    }
}
