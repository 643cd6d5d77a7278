//! Repairs pods of this node that should be redirected but are not.

fn main() -> std::process::ExitCode {
    inpod_service::main(&repair::SERVICE, repair::run)
}
