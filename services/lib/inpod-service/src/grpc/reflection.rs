//! Server reflection for grpcurl, in version v1 and, for older clients, v1alpha.
//!
//! Descriptors are decoded on first use, because most processes never serve reflection and the descriptors would be a
//! good part of an idle process's memory.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use tonic::{Status, body::Body, server::NamedService, service::Routes};
use tonic_reflection::server::Builder;
use tower::Service;

/// The maximum size of a request, which holds a name.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

const V1: &str = "grpc.reflection.v1.ServerReflection";
const V1ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";

/// Server reflection in version v1alpha if `ALPHA`, otherwise in version v1.
#[derive(Clone, Debug)]
pub(super) struct Reflection<const ALPHA: bool> {
    names: Arc<[&'static str]>,
    routes: Arc<OnceLock<Result<Routes, String>>>,
}

impl<const ALPHA: bool> Reflection<ALPHA> {
    /// Creates a reflection of the named services, with health and reflection in the list.
    pub(super) fn new(names: &Arc<[&'static str]>) -> Self {
        Self {
            names: Arc::clone(names),
            routes: Arc::default(),
        }
    }

    fn build(&self) -> Result<Routes, String> {
        let always = ["grpc.health.v1.Health", V1, V1ALPHA];
        let builder = Builder::configure()
            .register_encoded_file_descriptor_set(inpod_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(
                tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
            );
        let names = self.names.iter().copied().chain(always);
        let builder = names.fold(builder, |builder, name| builder.with_service_name(name));
        let max = MAX_MESSAGE_BYTES;
        let routes = match ALPHA {
            false => builder
                .build_v1()
                .map(|server| Routes::new(server.max_decoding_message_size(max))),
            true => builder
                .build_v1alpha()
                .map(|server| Routes::new(server.max_decoding_message_size(max))),
        };
        routes.map_err(|error| format!("cannot read the descriptors: {error}"))
    }
}

impl<const ALPHA: bool> NamedService for Reflection<ALPHA> {
    const NAME: &'static str = if ALPHA { V1ALPHA } else { V1 };
}

impl<const ALPHA: bool> Service<http::Request<Body>> for Reflection<ALPHA> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Each call clones the routes, which are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.routes.get_or_init(|| self.build()) {
            Ok(routes) => Box::pin(routes.clone().call(request)),
            Err(error) => {
                let answer = Status::internal(error.as_str()).into_http();
                Box::pin(async { Ok(answer) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_can_be_built_from_the_descriptors() {
        let names: Arc<[_]> = Arc::new(["inpod.netconfig.v1.NetconfigService"]);
        Reflection::<false>::new(&names).build().unwrap();
        Reflection::<true>::new(&names).build().unwrap();
    }
}
