//! The messages as they are on the wire, generated from `zds.proto`.
//!
//! A ztunnel needs none of them; a test that plays the agent does.

include!(concat!(env!("OUT_DIR"), "/istio.workload.zds.rs"));
