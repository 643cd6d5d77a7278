//! Gives each pod's network namespace to the node's ztunnel over ZDS.

fn main() -> std::process::ExitCode {
    daemon::main(&ztunnel_broker::SERVICE, ztunnel_broker::run)
}
