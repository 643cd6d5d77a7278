//! Finds pods of this node that should be redirected and are not, and takes the least disruptive action that helps.

fn main() -> std::process::ExitCode {
    inpod_service::main(&repair::SERVICE, repair::run)
}
