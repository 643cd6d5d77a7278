//! The contracts of inpod: the protobuf packages as modules, and their conversions into the checked types of
//! [`workload`].
//!
//! The `.proto` files beside this crate are the documentation of every message and call. The generated code is built
//! into `OUT_DIR` and never edited.

mod address;
mod class;
mod convert;
mod failure;

pub use address::{addresses_from, addresses_to};
pub use class::{Class, class_of};
pub use convert::{Invalid, required};
pub use failure::{code_of, failure_of, into_status};

/// Every message and call, described: for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// `inpod.types.v1`: the words that all packages share.
pub mod types {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("inpod.types.v1");
    }
}

/// `inpod.podevents.v1`: the CNI verbs, and answers for people.
pub mod podevents {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("inpod.podevents.v1");
    }
}

/// `inpod.netconfig.v1`: the network namespaces of pods.
pub mod netconfig {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("inpod.netconfig.v1");
    }
}

/// `inpod.ztunnelbroker.v1`: which pods the node's ztunnels serve.
pub mod ztunnelbroker {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("inpod.ztunnelbroker.v1");
    }
}

/// `istio.workload.zds`: what goes over the wire to ztunnel.
pub mod zds {
    tonic::include_proto!("istio.workload.zds");
}
