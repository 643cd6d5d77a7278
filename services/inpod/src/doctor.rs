//! `inpod doctor`: what is wrong with this node, each with a name and what to do about it.
//!
//! `gather` looks and judges nothing, `judge` judges and looks at nothing.

mod chain;
mod check;
mod codes;
mod facts;
mod gather;
mod judge;
mod mounts;
mod report;

pub(crate) use gather::{
    AT_WILL, INSTALLER_STATE, PATIENCE, Places, SERVICES, metrics, network_chain,
};

use crate::{arguments::Format, ask::Node, error::AskError, out::Out, root::Root};
use check::Check;
use codes::Verdict;

/// What to look at, and how.
#[derive(Clone, Debug)]
pub(crate) struct Examination {
    pub(crate) root: Root,
    pub(crate) places: Places,
    pub(crate) self_test: bool,
}

/// Prints what is found. An error where something failed.
pub(crate) async fn run(
    node: &Node,
    examination: &Examination,
    format: Format,
    out: &mut Out,
) -> Result<(), AskError> {
    let checks = examine(node, examination).await;
    match format {
        Format::Table => out.text(&report::text(&checks))?,
        Format::Json => out.line(&report::json(&checks))?,
    }
    let failed = checks
        .iter()
        .filter(|check| check.verdict == Verdict::Failed);
    match failed.count() {
        0 => Ok(()),
        failed => Err(AskError::Unwell(failed)),
    }
}

/// Looks at a node, for programs.
pub(crate) async fn as_json(node: &Node, examination: &Examination) -> String {
    report::json(&examine(node, examination).await)
}

async fn examine(node: &Node, examination: &Examination) -> Vec<Check> {
    let Examination {
        root,
        places,
        self_test,
    } = examination;
    judge::judge(&gather::gather(root, node, places, *self_test).await)
}
