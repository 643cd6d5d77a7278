//! May this pod join the mesh, and how?

fn main() -> std::process::ExitCode {
    daemon::main(&pod_events::SERVICE, pod_events::run)
}
