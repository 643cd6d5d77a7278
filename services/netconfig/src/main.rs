//! Makes a network namespace's redirection so, and proves it. The only process that enters one.

fn main() -> std::process::ExitCode {
    daemon::main(&netconfig::SERVICE, netconfig::run)
}
