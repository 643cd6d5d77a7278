//! `inpod bundle`: packs the responses and metrics of a node's services for a bug report.

mod archive;
mod parts;

use std::path::Path;

use crate::{arguments::BundleOptions, error::CommandError, node::Node, out::Out, print_error};
use archive::Archive;

pub(crate) async fn run(
    node: &Node,
    options: &BundleOptions,
    out: &mut Out,
) -> Result<(), CommandError> {
    let mut archive = Archive::new(&options.output)?;
    parts::add_all(node, &options.host, &mut archive).await?;
    let summary = archive.finish()?;
    if options.output == Path::new(archive::STDOUT) {
        print_error(&format!("{summary}\n"));
        return Ok(());
    }
    out.print_line(&summary)
}
