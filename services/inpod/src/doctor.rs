//! `inpod doctor`: what is wrong with this node, each with a name and what to do about it.
//!
//! `collect` looks and judges nothing, `checks` judges and looks at nothing.

mod chain;
mod check;
mod checks;
mod codes;
mod collect;
mod facts;
mod mounts;
mod report;

pub(crate) use collect::{
    HostPaths, INSTALLER_STATE, OPTIONAL_SERVICES, QUERY_TIMEOUT, SERVICES, metrics, network_chain,
};

use crate::{arguments::Format, error::CommandError, host_fs::HostFs, node::Node, out::Out};
use check::Check;
use codes::Verdict;

/// What to look at, and how.
#[derive(Clone, Debug)]
pub(crate) struct DoctorOptions {
    pub(crate) root: HostFs,
    pub(crate) paths: HostPaths,
    pub(crate) self_test: bool,
}

/// Prints what is found. An error where something failed.
pub(crate) async fn run(
    node: &Node,
    options: &DoctorOptions,
    format: Format,
    out: &mut Out,
) -> Result<(), CommandError> {
    let checks = evaluate(node, options).await;
    match format {
        Format::Table => out.text(&report::text(&checks))?,
        Format::Json => out.line(&report::json(&checks))?,
    }
    let failed = checks
        .iter()
        .filter(|check| check.verdict == Verdict::Failed);
    match failed.count() {
        0 => Ok(()),
        failed => Err(CommandError::ChecksFailed(failed)),
    }
}

/// Looks at a node, for programs.
pub(crate) async fn as_json(node: &Node, options: &DoctorOptions) -> String {
    report::json(&evaluate(node, options).await)
}

async fn evaluate(node: &Node, options: &DoctorOptions) -> Vec<Check> {
    let DoctorOptions {
        root,
        paths,
        self_test,
    } = options;
    checks::run(&collect::collect(root, node, paths, *self_test).await)
}
