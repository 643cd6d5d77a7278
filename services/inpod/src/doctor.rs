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

pub(crate) use collect::{HostPaths, OPTIONAL_SERVICES, QUERY_TIMEOUT, SERVICES, metrics};

use crate::{
    arguments::Format, error::CommandError, host_fs::HostFs, json, node::Node, out, out::Out,
};
use check::Check;
use codes::Verdict;

#[derive(Clone, Debug)]
pub(crate) struct DoctorOptions {
    pub(crate) root: HostFs,
    pub(crate) paths: HostPaths,
    pub(crate) self_test: bool,
    /// Leaves out checks of the node's files, which a container of inpod does not see.
    pub(crate) services_only: bool,
    /// Prints checks that passed, too.
    pub(crate) verbose: bool,
}

/// Prints the report, and returns an error if a check failed.
pub(crate) async fn run(
    node: &Node,
    options: &DoctorOptions,
    format: Format,
    out: &mut Out,
) -> Result<(), CommandError> {
    let checks = evaluate(node, options).await;
    match format {
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

pub(crate) async fn as_json(node: &Node, options: &DoctorOptions) -> String {
    report::json(&evaluate(node, options).await)
}

async fn evaluate(node: &Node, options: &DoctorOptions) -> Vec<Check> {
    let DoctorOptions {
        root,
        paths,
        self_test,
        services_only,
        verbose: _,
    } = options;
    let facts = collect::collect(root, node, paths, *self_test).await;
    match services_only {
        true => checks::run_services(&facts),
        false => checks::run(&facts),
    }
}
