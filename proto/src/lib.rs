//! The API contracts of inpod: the protobuf packages, with conversions to the types of [`inpod_types`].
//!
//! The `.proto` files document every message and call. The build script writes the generated code to `OUT_DIR`.

mod address;
mod class;
mod convert;
mod failure;
mod redirection;

pub use address::{addresses_from, addresses_to};
pub use class::{Class, class_of, max_request_bytes};
pub use convert::{Invalid, required};
pub use failure::{code_of, failure_of, into_status};

/// The descriptors of all packages with their comments, for server reflection and for tests of the contracts.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The package `inpod.types.v1`, whose messages and enums all other packages of inpod share.
pub mod types {
    /// Version 1 of the package, generated from its proto files.
    pub mod v1 {
        tonic::include_proto!("inpod.types.v1");
    }
}

/// The package `inpod.podevents.v1`, with the CNI verbs and the queries of operators.
pub mod podevents {
    /// Version 1 of the package, generated from its proto files.
    pub mod v1 {
        tonic::include_proto!("inpod.podevents.v1");
    }
}

/// The package `inpod.netconfig.v1`, which manages the network namespaces of pods.
pub mod netconfig {
    /// Version 1 of the package, generated from its proto files.
    pub mod v1 {
        tonic::include_proto!("inpod.netconfig.v1");
    }
}

/// The package `inpod.ztunnelbroker.v1`, which manages the pods that the node's ztunnels serve.
pub mod ztunnelbroker {
    /// Version 1 of the package, generated from its proto files.
    pub mod v1 {
        tonic::include_proto!("inpod.ztunnelbroker.v1");
    }
}

/// The package `inpod.log.v1`, with the levels of a service's log.
pub mod log {
    /// Version 1 of the package, generated from its proto files.
    pub mod v1 {
        tonic::include_proto!("inpod.log.v1");
    }
}

/// The package `istio.workload.zds`, with the messages between a node agent and ztunnel.
pub mod zds {
    tonic::include_proto!("istio.workload.zds");
}
