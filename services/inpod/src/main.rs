fn main() -> std::process::ExitCode {
    inpod::main(std::env::args_os())
}
