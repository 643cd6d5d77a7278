//! Checks from inside a pod that its traffic is redirected.

fn main() -> std::process::ExitCode {
    validate::main()
}
