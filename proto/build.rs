//! Compiles the proto files without protoc, and writes their descriptors for server reflection and for tests.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: &[&str] = &[
    "inpod/types/v1/types.proto",
    "inpod/log/v1/log_service.proto",
    "inpod/podevents/v1/pod_events_service.proto",
    "inpod/netconfig/v1/netconfig_service.proto",
    "inpod/netconfig/v1/netns_socket.proto",
    "inpod/ztunnelbroker/v1/ztunnel_broker_service.proto",
    "istio/workload/zds/zds.proto",
];

#[expect(
    clippy::disallowed_methods,
    reason = "cargo tells a build script where to write through the environment"
)]
fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["."])?;
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_files(FILES)?;
    let descriptors = compiler.file_descriptor_set();
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
