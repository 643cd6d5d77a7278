//! A ztunnel for tests and demos that behaves like stock ztunnel on ZDS.
//!
//! For each pod that the agent adds, it opens stock ztunnel's three TCP listeners inside the pod's network namespace
//! and forwards their connections:
//!
//! | port | direction | forwarded to |
//! |---|---|---|
//! | 15001 | outbound | the original destination, from the pod |
//! | 15006 | inbound, plaintext | the application in the pod, with the client's address kept |
//! | 15008 | inbound, HBONE | the application in the pod, with the client's address kept |
//!
//! With `--ca`, it speaks HBONE like stock ztunnel between the pods that it serves: an HTTP/2 CONNECT within TLS 1.3,
//! in which both ends prove a SPIFFE identity of namespace and service account. All other connections are plaintext,
//! and without `--ca` so are these: 15008 then takes a stand-in, an HTTP/1.1 `CONNECT ip:port`.
//!
//! It deliberately has no policy, control plane, pool of tunnels or DNS proxy (15053). Start reading with [`serve`]: `session` follows one connection to the agent, `pods` decides about requests, `proxy` serves one
//! pod, `forward` one connection.
//!
//! # The access log
//!
//! `--access-log` takes one JSON object per line, each appended with one write: `accepted` and `closed` lines
//! of a connection. Unknown fields are null; `original_destination` on 15008 is the CONNECT's target, known
//! only at the end.
//!
//! ```json
//! {"time":"2026-01-31T12:00:00.000000Z","event":"closed","connection":7,"uid":"uid-1",
//!  "listener":15006,"direction":"inbound","source":"10.0.0.1:40000",
//!  "original_destination":"10.0.0.2:8080","upstream_source":"10.0.0.1:33333",
//!  "bytes_from_source":78,"bytes_from_destination":165,"peer_identity":null,"error":null}
//! ```
//!
//! `peer_identity` is whom the other end of a tunnel proved to be. `connection` counts from 1 and links the two lines. `upstream_source` is the local address of the connection to
//! the destination. `error` begins with `refused: ` for a connection that would have come back to ztunnel, and is
//! `cut by ztunnel` if a Del, a new snapshot or the end of the process cut it.
//!
//! # The state file
//!
//! `--status` holds one JSON object. A rename replaces it at each change of state, before the request is answered.
//!
//! ```json
//! {"connected":true,"ready":true,"snapshot_complete":true,
//!  "pods":[{"uid":"uid-1","name":"client","namespace":"default","state":"running",
//!           "netns":{"dev":4,"ino":4026532500}}]}
//! ```
//!
//! `ready` means what stock ztunnel's readiness probe does: connected, the snapshot complete, and no pod `pending`.
//! One quirk is omitted: stock ztunnel's probe forgets a pod that fails after the snapshot until the next message.

mod access_log;
mod connect_request;
mod dial;
mod enter;
mod forward;
mod identity;
mod listeners;
mod mesh;
mod options;
mod pods;
mod proxy;
mod session;
mod state_file;
mod tls;
mod tunnel;
mod upstream;

pub use options::{Fault, Options};
pub use session::{ServeError, serve};
