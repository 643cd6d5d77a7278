use super::codes::{Code, Verdict};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    pub(crate) code: Code,
    /// The checked object; empty if the node has only one object of this kind.
    pub(crate) subject: String,
    pub(crate) verdict: Verdict,
    /// The evidence, or the reason why the check could not be done.
    pub(crate) found: String,
}

impl Check {
    pub(crate) fn ok(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Ok, found)
    }

    pub(crate) fn problem(code: Code, subject: &str, found: impl Into<String>) -> Self {
        Self::new(code, subject, code.severity(), found)
    }

    pub(crate) fn unknown(code: Code, subject: &str, why: impl Into<String>) -> Self {
        Self::new(code, subject, Verdict::Unknown, why)
    }

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
