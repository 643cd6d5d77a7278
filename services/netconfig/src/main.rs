//! Claims pods' network namespaces, writes their redirection and reads it back. The only process that enters one.

fn main() -> std::process::ExitCode {
    if let Some(failed) = netconfig::run_program(std::env::args_os()) {
        return failed;
    }
    inpod_service::main(&netconfig::SERVICE, netconfig::run)
}
