//! The API contracts of inpod: the protobuf packages, with conversions to the types of [`inpod_types`].
//!
//! The `.proto` files document every message and call. Generated code is in `OUT_DIR`.

mod address;
mod class;
mod convert;
mod failure;

pub use address::{addresses_from, addresses_to};
pub use class::{Class, class_of};
pub use convert::{Invalid, required};
pub use failure::{code_of, failure_of, into_status};

/// The descriptors of everything, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// `inpod.types.v1`: the messages and enums that all packages share.
pub mod types {
    /// Version 1 of the package.
    pub mod v1 {
        tonic::include_proto!("inpod.types.v1");
    }
}

/// `inpod.podevents.v1`: the CNI verbs and the queries of operators.
pub mod podevents {
    /// Version 1 of the package.
    pub mod v1 {
        tonic::include_proto!("inpod.podevents.v1");
    }
}

/// `inpod.netconfig.v1`: the network namespaces of pods.
pub mod netconfig {
    /// Version 1 of the package.
    pub mod v1 {
        tonic::include_proto!("inpod.netconfig.v1");
    }
}

/// `inpod.ztunnelbroker.v1`: the pods that the node's ztunnels serve.
pub mod ztunnelbroker {
    /// Version 1 of the package.
    pub mod v1 {
        tonic::include_proto!("inpod.ztunnelbroker.v1");
    }
}

/// `istio.workload.zds`: the messages between a node agent and ztunnel.
pub mod zds {
    tonic::include_proto!("istio.workload.zds");
}
