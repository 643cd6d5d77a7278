//! Checks from inside a pod that the pod's traffic is redirected.

fn main() -> std::process::ExitCode {
    validate::main()
}
