//! The messages in their form on the wire, generated from `zds.proto`.
//!
//! A ztunnel needs none of these messages; a test that plays the agent does.

include!(concat!(env!("OUT_DIR"), "/istio.workload.zds.rs"));
