use std::fmt::Write as _;

use serde_json::json;

use super::{check::Check, codes::Verdict};
use crate::table::{Table, clean};

/// Renders the checks as text: the worst verdict comes first, and each problem is followed by its remedy.
pub(super) fn text(checks: &[Check]) -> String {
    let mut text = String::new();
    for verdict in [Verdict::Failed, Verdict::Warning, Verdict::Unknown] {
        for check in checks.iter().filter(|check| check.verdict == verdict) {
            let name = named(check);
            writeln!(
                text,
                "{:8}{name}: {}",
                verdict.as_str(),
                clean(&check.found)
            )
            .unwrap_or_default();
            if verdict != Verdict::Unknown {
                writeln!(text, "        What to do: {}", check.code.remedy()).unwrap_or_default();
            }
        }
    }
    if !text.is_empty() {
        text.push('\n');
    }
    let mut table = Table::new(&["OK", "OF", "FOUND"]);
    for check in checks.iter().filter(|check| check.verdict == Verdict::Ok) {
        table.push([
            check.code.name().to_owned(),
            check.subject.clone(),
            check.found.clone(),
        ]);
    }
    text + &table.take() + "\n" + &summary(checks)
}

fn named(check: &Check) -> String {
    if check.subject.is_empty() {
        return check.code.to_string();
    }
    format!("{} ({})", check.code, clean(&check.subject))
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
    let all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "failed": count(checks, Verdict::Failed),
        "warnings": count(checks, Verdict::Warning),
        "unknown": count(checks, Verdict::Unknown),
        "checks": checks_shown,
    });
    format!("{all:#}")
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
    fn what_is_wrong_comes_first_with_what_to_do() {
        let text = text(&checks());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "failed  SOCKET_OPEN (netconfig): its mode\\u{1b}[2J"
        );
        assert!(
            lines[1].contains("What to do: Restart the service"),
            "{text}"
        );
        assert_eq!(lines[2], "unknown SELF_TEST_FAILED: not run");
        assert!(text.contains("KERNEL_TOO_OLD  -   Linux 6.1"), "{text}");
        assert!(
            text.ends_with("1 failed, 0 warnings, 1 unknown, 1 ok\n"),
            "{text}"
        );
    }

    #[test]
    fn programs_are_told_every_check_with_its_code_and_remedy() {
        let value: serde_json::Value = serde_json::from_str(&json(&checks())).unwrap();
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
