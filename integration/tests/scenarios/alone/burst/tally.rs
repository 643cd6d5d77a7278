//! Outcomes and durations of many calls.

use std::{collections::BTreeMap, time::Duration};

use integration::Answer;

pub(crate) fn percentile<'a, T: 'a>(
    answers: impl IntoIterator<Item = &'a Answer<T>>,
    of: usize,
) -> Duration {
    let mut took: Vec<_> = answers.into_iter().map(|answer| answer.took).collect();
    took.sort();
    let last = took.len().saturating_sub(1);
    let index = (took.len() * of / 100).min(last);
    took.get(index).copied().unwrap_or_default()
}

pub(crate) fn outcomes<'a, T: 'a>(
    answers: impl IntoIterator<Item = &'a Answer<T>>,
) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for answer in answers {
        let name = answer.result.as_ref().map_or_else(
            |failure| failure.reason.name().to_owned(),
            |_| "ok".to_owned(),
        );
        *counts.entry(name).or_default() += 1;
    }
    counts
}

/// Returns the outcomes if all calls succeeded.
pub(crate) fn all_ok(count: usize) -> BTreeMap<String, usize> {
    [("ok".to_owned(), count)].into()
}

/// Prints a line for the reader of the log.
#[expect(
    clippy::needless_pass_by_value,
    reason = "an iterator is given away, as everywhere"
)]
pub(crate) fn print_line<'a, T: 'a>(
    answers: impl IntoIterator<Item = &'a Answer<T>> + Clone,
) -> String {
    let at = |of| percentile(answers.clone(), of);
    let counts = outcomes(answers.clone());
    format!(
        "p50 {:?} p99 {:?} most {:?} {counts:?}",
        at(50),
        at(99),
        at(100)
    )
}
