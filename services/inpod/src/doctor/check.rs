use super::codes::{Code, Verdict};

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// The problem that was checked for.
    pub(crate) code: Code,
    /// The object of the check; empty if there is only one.
    pub(crate) subject: String,
    pub(crate) verdict: Verdict,
    /// The evidence, or the reason why the check could not be done.
    pub(crate) found: String,
}

impl Check {
    /// Reports that the problem does not exist.
    pub(crate) fn ok(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Ok, found)
    }

    /// Reports that the problem exists.
    pub(crate) fn problem(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, code.severity(), found)
    }

    /// Reports that the check could not be done.
    pub(crate) fn unknown(code: Code, subject: &str, why: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Unknown, why)
    }

    /// Reports whether the problem exists.
    pub(crate) fn whether(
        is_problem: bool,
        code: Code,
        subject: &str,
        found: impl Into<String>,
    ) -> Self {
        let verdict = if is_problem {
            code.severity()
        } else {
            Verdict::Ok
        };
        Self::new(code, subject, verdict, found)
    }

    fn new(code: Code, subject: &str, verdict: Verdict, found: impl Into<String>) -> Self {
        Self {
            code,
            subject: subject.to_owned(),
            verdict,
            found: found.into(),
        }
    }
}
