//! `inpod doctor`: reports each problem of a node with a code and a remedy.
//!
//! The module `collect` gathers facts without judging them; `checks` judges the facts and reads nothing else.

mod chain;
mod check;
mod checks;
mod codes;
mod collect;
mod facts;
mod mounts;
mod report;

pub(crate) use collect::{OPTIONAL_SERVICES, QUERY_TIMEOUT, SERVICES, metrics};

use crate::{
    arguments::{DoctorOptions, Format, HostOptions},
    error::CommandError,
    json,
    node::Node,
    out,
    out::Out,
};
use check::Check;
use codes::Verdict;

/// Prints the report, and returns an error if a check failed.
pub(crate) async fn run(
    node: &Node,
    options: &DoctorOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let checks = evaluate(node, &options.host, options.self_test).await;
    match options.format {
        Format::Table | Format::Wide => {
            out.print_text(&report::text(&checks, options.verbose, out::has_colour()))?;
        }
        Format::Json => out.print_line(&report::json(&checks))?,
        Format::Yaml => out.print_line(&json::yaml(&report::value(&checks))?)?,
    }
    let failed = checks
        .iter()
        .filter(|check| check.verdict == Verdict::Failed);
    match failed.count() {
        0 => Ok(()),
        failed => Err(CommandError::ChecksFailed(failed)),
    }
}

pub(crate) async fn as_json(node: &Node, host: &HostOptions) -> String {
    report::json(&evaluate(node, host, false).await)
}

async fn evaluate(node: &Node, host: &HostOptions, self_test: bool) -> Vec<Check> {
    let facts = collect::collect(node, host, self_test).await;
    match host.services_only {
        true => checks::run_services(&facts),
        false => checks::run(&facts),
    }
}
