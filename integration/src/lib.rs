//! The test harness: a node in namespaces, real clients, and scenarios with the real binaries.
//!
//! A [`Node`] is a network namespace with a bridge and a directory; services, ztunnel and plugin are the real binaries,
//! run as in production. A [`Pod`] is a network namespace with a veth, as a CNI chain leaves a pod. All tests run
//! behind `integration/isolate`; [`guard`] refuses to run elsewhere.

mod api;
mod api_proxy;
mod apiserver;
mod call;
mod cgroups;
pub mod chart;
pub mod clients;
mod command_line;
mod deployed;
mod evidence;
mod guard;
mod inhabitant;
mod istio_cni;
pub mod kubernetes;
mod node;
pub mod picture;
mod plugin;
mod pod;
mod process;
mod proxy;
mod state;
mod stock;
mod traffic;
mod verbs;

pub use api::Api;
pub use api_proxy::{Act, ApiProxy, Asked, Cut, Verb};
pub use apiserver::{ApiServer, tool};
pub use call::{HealthWatch, call, health, methods, refusal};
pub use cgroups::{Cgroups, ZTUNNEL_CAPABILITIES};
pub use command_line::answer;
pub use deployed::{DeployedNode, Mesh, PluginCall};
pub use evidence::{Access, counted, counters};
pub use guard::{guard, is_alone, is_full_run, not_run, not_run_alone};
pub use inhabitant::Inhabitant;
pub use istio_cni::{IstioCni, istio_cni_programs};
pub use node::{Node, SERVICES};
pub use plugin::{Call, Outcome, Running};
pub use pod::{Pod, Spec, fresh_netns};
pub use process::{bin, bin_for_all, install_program, run};
pub use proxy::{Held, Moment, Proxy, Step};
pub use state::State;
pub use stock::{Carried, STOCK_ZTUNNEL, stock_ztunnel};
pub use traffic::{App, ask, connect, connect_marked, exchange, listen, source_seen};
pub use verbs::{Answer, Called, Named, Verbs, number};

use std::{
    fmt::Display,
    thread,
    time::{Duration, Instant},
};

/// The timeout for conditions that should hold at once. The timeout is long because test machines are noisy.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Repeats `look` until it succeeds, and fails after `patience` with the last error.
pub fn eventually<T, E: Display>(
    what: &str,
    patience: Duration,
    mut look: impl FnMut() -> Result<T, E>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() >= deadline => {
                anyhow::bail!("not in {patience:?}: {what}: {error}")
            }
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}
