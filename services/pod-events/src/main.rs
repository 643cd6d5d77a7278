fn main() -> std::process::ExitCode {
    inpod_service::main(&pod_events::SERVICE, pod_events::run)
}
