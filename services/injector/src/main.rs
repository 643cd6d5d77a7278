//! Mutating admission webhook that injects sidecars into pods.

fn main() -> std::process::ExitCode {
    inpod_service::main(&injector::SERVICE, injector::run)
}
