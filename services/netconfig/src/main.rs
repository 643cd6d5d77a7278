//! The netconfig binary.

fn main() -> std::process::ExitCode {
    inpod_service::main(&netconfig::SERVICE, netconfig::run)
}
