//! Hands each pod's network namespace to the node's ztunnel over ZDS.

fn main() -> std::process::ExitCode {
    inpod_service::main_on_one_thread(&ztunnel_broker::SERVICE, ztunnel_broker::run)
}
