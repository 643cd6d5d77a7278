//! `inpod bundle`: collects the state of a node, without secrets, for a bug report.
//!
//! Each part has a deadline, and so has the whole bundle. The manifest lists the missing parts with the cause, and all
//! output passes through `redact`.

mod collect;
mod files;
mod parts;
mod redact;
mod sink;
mod tar;

use std::path::Path;

use crate::{arguments::BundleOptions, error::CommandError, node::Node, out::Out, print_error};
use collect::Collector;

pub(crate) async fn run(
    node: &Node,
    options: &BundleOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let mut collector = Collector::new(options)?;
    parts::all(node, options, &mut collector).await?;
    let summary = collector.finish()?;
    if options.output == Path::new(sink::STDOUT) {
        print_error(&format!("{summary}\n"));
        return Ok(());
    }
    out.print_line(&summary)
}
