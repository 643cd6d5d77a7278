//! A ztunnel for tests and demos that behaves like stock ztunnel on ZDS.
//!
//! For each pod that the agent adds, the program opens stock ztunnel's three TCP listeners inside the pod's network
//! namespace and forwards their connections:
//!
//! | port | direction | forwarded to |
//! |---|---|---|
//! | 15001 | outbound | the original destination, from the pod |
//! | 15006 | inbound, plaintext | the application in the pod, with the client's address kept |
//! | 15008 | inbound, HBONE | the application in the pod, with the client's address kept |
//!
//! With `--ca`, the program speaks HBONE like stock ztunnel between the pods that it serves: an HTTP/2 CONNECT within
//! TLS 1.3, in which both ends prove a SPIFFE identity of namespace and service account. All other connections are
//! plaintext. Without `--ca`, connections between served pods are plaintext, too: port 15008 then takes a stand-in for
//! HBONE, an HTTP/1.1 `CONNECT ip:port`.
//!
//! With `--dns`, the program also listens for DNS over UDP and TCP on port 15053 of both loopback addresses, and answers
//! each query with SERVFAIL.
//!
//! The program deliberately has no policy, control plane, pool of tunnels or resolver. Readers start with
//! [`serve`]: `session` follows a connection to the agent, `pods` decides about requests, `proxy` serves a pod, and
//! `forward` serves a connection.
//!
//! # The access log
//!
//! The file of `--access-log` receives one JSON object per line, each appended with one write: an `accepted` and a
//! `closed` line for each connection. Unknown fields are null; `original_destination` on 15008 is the CONNECT's target,
//! known only at the end.
//!
//! ```json
//! {"time":"2026-01-31T12:00:00.000000Z","event":"closed","connection":7,"uid":"uid-1",
//!  "listener":15006,"direction":"inbound","source":"10.0.0.1:40000",
//!  "original_destination":"10.0.0.2:8080","upstream_source":"10.0.0.1:33333",
//!  "bytes_from_source":78,"bytes_from_destination":165,"peer_identity":null,"error":null}
//! ```
//!
//! `peer_identity` is the identity that the other end of a tunnel proved. `connection` counts from 1 and links the two
//! lines. `upstream_source` is the local address of the connection to the destination. `error` begins with `refused: `
//! for a connection that would have come back to ztunnel, and is `cut by ztunnel` if a Del, a new snapshot or the end
//! of the process cut the connection.
//!
//! # The state file
//!
//! The file of `--status` holds one JSON object. A rename replaces the file at each change of state, before the request
//! is answered.
//!
//! ```json
//! {"connected":true,"ready":true,"snapshot_complete":true,
//!  "pods":[{"uid":"uid-1","name":"client","namespace":"default","state":"running",
//!           "netns":{"dev":4,"ino":4026532500}}]}
//! ```
//!
//! `ready` is true under the conditions of stock ztunnel's readiness probe: connected, the snapshot complete, and no
//! pod `pending`. One quirk is omitted: stock ztunnel's probe forgets a pod that fails after the snapshot until the
//! next message.

mod access_log;
mod connect_request;
mod connection;
mod dial;
mod dns;
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
