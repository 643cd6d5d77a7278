//! Finds the pods of this node that should be redirected and are not, and does the kindest thing that helps.

fn main() -> std::process::ExitCode {
    inpod_service::main(&repair::SERVICE, repair::run)
}
