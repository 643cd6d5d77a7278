//! A service of a later release with socket, health and metrics, to test how the skew is reported.

use std::process::ExitCode;

use inpod_service::Service;

const SERVICE: Service = Service {
    name: "installer",
    about: "Plays an installer of a release that does not exist",
    version: "0.9.0",
    keys: &[],
};

/// The service has no settings of its own.
type Settings = std::collections::BTreeMap<String, String>;

fn main() -> ExitCode {
    inpod_service::main(&SERVICE, |_: Settings, daemon| async move {
        daemon.server().serve().await
    })
}
