//! Generates the messages of ZDS from the contract in `proto/`, without `protoc`.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new("../../proto");
    let contract = root.join("istio/workload/zds/zds.proto");
    let descriptors = protox::compile([&contract], [root])?;
    prost_build::Config::new().compile_fds(descriptors)?;
    // Without this line, cargo would rerun the script whenever any file of the package changes.
    println!("cargo::rerun-if-changed={}", contract.display());
    Ok(())
}
