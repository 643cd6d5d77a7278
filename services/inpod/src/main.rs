//! The binary of the client `inpod`.

fn main() -> std::process::ExitCode {
    inpod::main(std::env::args_os())
}
