use super::codes::{Code, Verdict};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// What would be wrong.
    pub(crate) code: Code,
    /// Of what; empty where there is but one.
    pub(crate) subject: String,
    /// What it came to.
    pub(crate) verdict: Verdict,
    /// What was found, with its evidence; of what is unknown why it could not be looked at.
    pub(crate) found: String,
}

impl Check {
    /// As it should be.
    pub(crate) fn ok(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Ok, found)
    }

    /// What the code says is so.
    pub(crate) fn problem(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, code.severity(), found)
    }

    /// It could not be looked at.
    pub(crate) fn unknown(code: Code, subject: &str, why: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Unknown, why)
    }

    /// What the code says is so, or not.
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
