//! A plaintext ztunnel for tests and demos that behaves like the stock one on ZDS.
//!
//! For each pod that the agent adds it opens, inside the pod's network namespace, the stock
//! ztunnel's three TCP listeners and forwards what arrives there:
//!
//! | port | direction | forwarded to |
//! |---|---|---|
//! | 15001 | outbound | the original destination, from the pod |
//! | 15006 | inbound, plaintext | the application in the pod, with the client's address kept |
//! | 15008 | inbound, HBONE | a **stand-in**: plaintext HTTP/1.1 `CONNECT ip:port`, then bytes; no TLS, no HTTP/2 |
//!
//! It deliberately has no identity, no encryption, no policy, no control plane and no DNS proxy
//! (15053). Start with [`serve`]: the module `session` follows one connection to the agent,
//! `pods` decides what a request means, `proxy` serves one pod, `forward` one connection.
//!
//! # The access log
//!
//! `--access-log` takes one JSON object per line, appended with one write: an `accepted` line
//! when a connection is accepted and a `closed` line when it ends. A field that is not known
//! (yet) is null; `original_destination` on 15008 is the CONNECT's target and so known at the end.
//!
//! ```json
//! {"time":"2026-01-31T12:00:00.000000Z","event":"closed","connection":7,"uid":"uid-1",
//!  "listener":15006,"direction":"inbound","source":"10.0.0.1:40000",
//!  "original_destination":"10.0.0.2:8080","upstream_source":"10.0.0.1:33333",
//!  "bytes_from_source":78,"bytes_from_destination":165,"error":null}
//! ```
//!
//! `connection` counts from 1 and ties the two lines together. `upstream_source` is the local
//! address of the connection that was made to the destination. `error` begins with `refused: ` for
//! what would have come back to ztunnel, and is `cut by ztunnel` where a Del, a new snapshot or
//! the end of the process cut a live connection.
//!
//! # The state file
//!
//! `--status` holds one JSON object and is replaced by a rename whenever the state changes, and
//! before the request that changed it is answered.
//!
//! ```json
//! {"connected":true,"ready":true,"snapshot_complete":true,
//!  "pods":[{"uid":"uid-1","name":"client","namespace":"default","state":"running",
//!           "netns":{"dev":4,"ino":4026532500}}]}
//! ```
//!
//! `ready` is what the stock ztunnel's readiness probe answers: connected, the snapshot complete,
//! and no pod `pending`. It leaves out one quirk of stock, whose probe forgets a pod that fails
//! after the snapshot until the next message.

mod access_log;
mod connect_request;
mod dial;
mod enter;
mod forward;
mod listeners;
mod options;
mod pods;
mod proxy;
mod session;
mod state_file;
mod upstream;

pub use options::{Fault, Options};
pub use session::{ServeError, serve};
