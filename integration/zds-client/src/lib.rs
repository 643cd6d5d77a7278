//! A client of ZDS, the protocol by which a ztunnel receives the pods of its node.
//!
//! The node agent listens on a Unix socket of type `SOCK_SEQPACKET`. A ztunnel connects, sends a
//! hello, and from then on receives one request per packet: add, keep or delete a pod, and once per
//! connection "the snapshot is complete". An Add carries the pod's network namespace as a
//! descriptor. A ztunnel is a loop of these steps: receive a request, open the listeners in the
//! namespace of the pod, acknowledge the request.
//!
//! ```no_run
//! use zds_client::{Client, Received};
//!
//! # async fn open_listeners(netns: std::os::fd::OwnedFd) -> Result<(), String> { Ok(()) }
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let mut client = Client::connect("/var/run/ztunnel/ztunnel.sock").await?;
//! loop {
//!     let outcome = match client.recv().await {
//!         Ok(Some(Received::Add { netns, .. })) => open_listeners(netns).await,
//!         Ok(Some(Received::Keep { .. } | Received::Del { .. } | Received::SnapshotSent)) => Ok(()),
//!         // The agent closed the connection: connect again at once, pods keep running.
//!         Ok(None) => break Ok(()),
//!         // Answer why, then leave. The stock ztunnel reconnects after a read error and exits after a
//!         // protocol error.
//!         Err(error) => {
//!             client.ack(Err(&error.to_string())).await?;
//!             break Err(error.into());
//!         }
//!     };
//!     client.ack(outcome.as_ref().copied().map_err(String::as_str)).await?;
//! }
//! # }
//! ```
//!
//! The agent relies on four properties, which a ztunnel therefore has to implement:
//!
//! - **One answer per request, in order.** An answer carries no id: the agent assigns answers to
//!   requests by their position.
//! - **The snapshot replaces.** The pods named (added or kept) before [`Received::SnapshotSent`]
//!   are all pods of the node; every other pod that still runs from an earlier connection is
//!   stopped at this point, and not before.
//! - **A connection is not a lifetime.** Pods keep running while the agent is away.
//! - **The same pod in the same namespace is no change**: acknowledge and restart nothing.
//!
//! The client makes all checks that need no knowledge of pods: sizes, descriptors, the encoding,
//! and the order of the snapshot. The client does not reconnect, retry or keep pods; these are
//! tasks of the ztunnel, for which `integration/reference-ztunnel` is an example.
#![warn(missing_docs)]

mod client;
mod error;
pub mod proto;
mod request;

pub use client::{Client, DEFAULT_RECEIVE_BUFFER, Options};
pub use error::{AckError, ConnectError, ProtocolError, ReadError, RecvError};
pub use proto::WorkloadInfo;
pub use request::Received;
