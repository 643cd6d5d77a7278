//! The netconfig binary. As its own helper process, it executes an iptables program instead of serving.

fn main() -> std::process::ExitCode {
    if let Some(failed) = netconfig::run_program(std::env::args_os()) {
        return failed;
    }
    inpod_service::main(&netconfig::SERVICE, netconfig::run)
}
