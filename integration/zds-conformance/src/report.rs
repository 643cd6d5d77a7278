//! Writes the report of a run, for people and for machines.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde_json::{Value, json};

use crate::case::{Outcome, Profile, Record, Stop};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// At least one case ran, and all cases passed.
    Passed,
    Failed,
    /// No case failed, but the kit could not finish a case, or there was none.
    NotRun,
}

impl Verdict {
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Self {
        let outcomes = records.into_iter().map(|record| &record.outcome);
        let outcomes: Vec<_> = outcomes.collect();
        let any = |wanted: fn(&Outcome) -> bool| outcomes.iter().any(|outcome| wanted(outcome));
        if any(|outcome| matches!(outcome, Err(Stop::Failed { .. }))) {
            Self::Failed
        } else if any(|outcome| matches!(outcome, Err(Stop::Broken(_)))) || !any(Outcome::is_ok) {
            Self::NotRun
        } else {
            Self::Passed
        }
    }

    pub const fn code(self) -> u8 {
        match self {
            Self::Passed => 0,
            Self::Failed => 1,
            Self::NotRun => 2,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotRun => "COULD NOT BE RUN",
        }
    }
}

/// Returns a verdict for each profile of which a case ran.
fn verdicts(records: &[Record]) -> BTreeMap<Profile, Verdict> {
    let of_profile = |profile| {
        records
            .iter()
            .filter(move |record| record.profile == profile)
    };
    let profiles = records.iter().map(|record| record.profile);
    profiles
        .map(|profile| (profile, Verdict::of(of_profile(profile))))
        .collect()
}

fn name(record: &Record) -> &'static str {
    match &record.outcome {
        Ok(()) => "passed",
        Err(Stop::Failed { .. }) => "FAILED",
        Err(Stop::Skipped(_)) => "skipped",
        Err(Stop::Broken(_)) => "not run",
    }
}

pub fn lines(record: &Record) -> String {
    let rules = record.rules.join(" ");
    let head = format!(
        "{:7} {:38} {:>6} ms  {:7} [{rules}]",
        name(record),
        record.name,
        record.milliseconds,
        record.profile
    );
    let mut lines = vec![head];
    match &record.outcome {
        Ok(()) => {}
        Err(Stop::Failed { expected, seen }) => {
            lines.push(format!("        {}", record.about));
            lines.push(format!("        expected: {expected}"));
            lines.push(format!("        seen:     {seen}"));
        }
        Err(Stop::Skipped(why) | Stop::Broken(why)) => lines.push(format!("        {why}")),
    }
    lines.extend(
        record
            .notes
            .iter()
            .map(|note| format!("        note: {note}")),
    );
    lines.join("\n")
}

pub fn summary(records: &[Record]) -> String {
    let count = |wanted: &str| {
        records
            .iter()
            .filter(|record| name(record) == wanted)
            .count()
    };
    let (passed, failed) = (count("passed"), count("FAILED"));
    let (skipped, broken) = (count("skipped"), count("not run"));
    let verdict = Verdict::of(records).name();
    let profiles = verdicts(records).into_iter();
    let profiles: Vec<_> = profiles
        .map(|(profile, verdict)| format!("{profile}: {}", verdict.name()))
        .collect();
    let profiles = profiles.join(", ");
    format!(
        "{passed} passed, {failed} failed, {skipped} skipped, {broken} not run\nVerdict: {verdict} ({profiles})"
    )
}

pub fn write_json(path: &Path, peer: &str, records: &[Record]) -> io::Result<()> {
    let cases: Vec<_> = records.iter().map(case).collect();
    let verdict = Verdict::of(records).name().to_lowercase();
    let profiles = verdicts(records).into_iter();
    let profiles: BTreeMap<_, _> = profiles
        .map(|(profile, verdict)| (profile.to_string(), verdict.name().to_lowercase()))
        .collect();
    let run = json!({"peer": peer, "verdict": verdict, "profiles": profiles, "cases": cases});
    fs::write(path, serde_json::to_vec_pretty(&run)?)
}

fn case(record: &Record) -> Value {
    let mut case = json!({
        "name": record.name,
        "about": record.about,
        "rules": record.rules,
        "profile": record.profile.to_string(),
        "outcome": name(record).to_lowercase(),
        "milliseconds": u64::try_from(record.milliseconds).unwrap_or(u64::MAX),
        "notes": record.notes,
    });
    let evidence = match &record.outcome {
        Ok(()) => json!({}),
        Err(Stop::Failed { expected, seen }) => json!({"expected": expected, "seen": seen}),
        Err(Stop::Skipped(why) | Stop::Broken(why)) => json!({"why": why}),
    };
    if let (Some(case), Value::Object(evidence)) = (case.as_object_mut(), evidence) {
        case.extend(evidence);
    }
    case
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(outcome: Outcome) -> Record {
        Record {
            name: "n",
            about: "a",
            rules: &["Z1"],
            profile: Profile::Control,
            outcome,
            notes: vec![],
            milliseconds: 1,
        }
    }

    #[test]
    fn one_failure_is_a_failure_and_nothing_that_ran_is_no_pass() {
        let skipped = || record(Err(Stop::Skipped("s".into())));
        let broken = || record(Err(Stop::Broken("b".into())));
        let failed = || record(crate::case::failed("e", "s"));
        assert_eq!(Verdict::of(&[record(Ok(())), skipped()]), Verdict::Passed);
        assert_eq!(
            Verdict::of(&[record(Ok(())), broken(), failed()]),
            Verdict::Failed
        );
        assert_eq!(Verdict::of(&[record(Ok(())), broken()]), Verdict::NotRun);
        assert_eq!(Verdict::of(&[skipped()]), Verdict::NotRun);
        assert_eq!(Verdict::of(&[]), Verdict::NotRun);
    }

    #[test]
    fn each_profile_has_a_verdict_of_its_own() {
        let control = record(Ok(()));
        let mut data = record(crate::case::failed("e", "s"));
        data.profile = Profile::Data;
        let text = summary(&[control, data]);
        assert!(
            text.ends_with("Verdict: FAILED (control: passed, data: FAILED)"),
            "{text}"
        );
    }

    #[test]
    fn a_failure_is_told_with_its_evidence() {
        let text = lines(&record(crate::case::failed("one", "two")));
        assert!(
            text.contains("expected: one") && text.contains("seen:     two"),
            "{text}"
        );
    }
}
