//! Gives pods their sidecar: a mutating admission webhook.

fn main() -> std::process::ExitCode {
    daemon::main(&injector::SERVICE, injector::run)
}
