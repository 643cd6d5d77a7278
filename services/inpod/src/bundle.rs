//! `inpod bundle`: packs the responses and metrics of a node's services for a bug report. Logs, which other programs
//! fill, are added only on request.

mod archive;
mod logs;
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
    if options.logs {
        logs::add_all(&options.host.root(), &mut archive)?;
        print_error(
            "the bundle contains logs, which are not redacted: read them before you share it\n",
        );
    }
    let summary = archive.finish()?;
    if options.output == Path::new(archive::STDOUT) {
        print_error(&format!("{summary}\n"));
        return Ok(());
    }
    out.print_line(&summary)
}
