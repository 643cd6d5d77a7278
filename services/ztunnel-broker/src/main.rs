//! Hands each pod's network namespace to the node's ztunnel over ZDS.

fn main() -> std::process::ExitCode {
    inpod_service::main(&ztunnel_broker::SERVICE, ztunnel_broker::run)
}
