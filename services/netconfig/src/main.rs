//! Makes a network namespace's redirection so, and proves it. The only process that enters one.

fn main() -> std::process::ExitCode {
    if let Some(failed) = netconfig::run_program(std::env::args_os()) {
        return failed;
    }
    daemon::main(&netconfig::SERVICE, netconfig::run)
}
