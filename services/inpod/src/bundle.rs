//! `inpod bundle`: what is known of a node, for somebody who is to help, without secrets.
//!
//! Each part has its own deadline, and the whole one too; what could not be had is named in the manifest with its
//! cause. What is written has passed `redact`, all of it.

mod collect;
mod files;
mod parts;
mod redact;
mod sink;
mod tar;

use crate::{arguments::BundleOptions, error::CommandError, node::Node, out::Out};
use collect::Collector;

/// Collects it, and says where it is.
pub(crate) async fn run(
    node: &Node,
    options: &BundleOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let mut collector = Collector::new(options)?;
    parts::all(node, options, &mut collector).await?;
    let summary = collector.finish()?;
    out.line(&summary)
}
