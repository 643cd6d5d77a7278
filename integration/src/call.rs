use std::{path::Path, time::Duration};

use inpod_proto::failure_of;
use inpod_types::Failure;
use prost_reflect::DescriptorPool;
use tokio::runtime::{Builder, Runtime};
use tonic::{Request, Status, Streaming, client::Grpc, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
    health_client::HealthClient,
};
use tonic_prost::ProstCodec;

const LIMIT: Duration = Duration::from_secs(20);

/// Returns the methods of a service, such as `pod-events`, as paths.
///
/// # Panics
///
/// Panics if the descriptors of the contracts have no such service.
#[expect(clippy::expect_used, reason = "without them nothing would be tested")]
pub fn methods(service: &str) -> Vec<String> {
    let package = format!("inpod.{}.v1.", service.replace('-', ""));
    let pool = DescriptorPool::decode(inpod_proto::DESCRIPTORS).expect("descriptors");
    let mut services = pool.services();
    let found = services.find(|it| it.full_name().starts_with(&package));
    let found = found.expect("a service of this name");
    let path = |name: &str| format!("/{}/{name}", found.full_name());
    found.methods().map(|method| path(method.name())).collect()
}

fn runtime() -> Result<Runtime, Status> {
    let built = Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Status::internal(error.to_string()))
}

/// Calls a method by its path, such as `/inpod.netconfig.v1.NetconfigService/ApplyRules`, and discards the response.
pub fn call<T>(socket: &Path, method: &str, message: T) -> Result<(), Status>
where
    T: prost::Message + Send + Sync + 'static,
{
    let path = method.parse();
    let path = path.map_err(|_| Status::invalid_argument(format!("{method} is no path")))?;
    runtime()?.block_on(async {
        let mut client = Grpc::new(inpod_service::channel(socket));
        let ready = client.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(message);
        request.set_timeout(LIMIT);
        let codec = ProstCodec::<T, ()>::default();
        client.unary(request, path, codec).await.map(drop)
    })
}

/// Calls a method with an empty message, and returns the refusal.
pub fn refusal(socket: &Path, method: &str) -> anyhow::Result<Failure> {
    match call(socket, method, ()) {
        Ok(()) => anyhow::bail!("{method} was answered"),
        Err(status) => Ok(failure_of(&status)),
    }
}

/// Returns the health of a service; an empty name means the health of the whole process.
pub fn health(socket: &Path, service: &str) -> anyhow::Result<ServingStatus> {
    let mut request = Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    request.set_timeout(LIMIT);
    let answered = runtime()?.block_on(async {
        let mut client = HealthClient::new(inpod_service::channel(socket));
        client.check(request).await
    });
    Ok(answered?.into_inner().status())
}

/// A stream of the health of a process, with each change.
#[derive(Debug)]
pub struct HealthWatch {
    runtime: Runtime,
    stream: Streaming<HealthCheckResponse>,
    _client: HealthClient<Channel>,
}

impl HealthWatch {
    pub fn start(socket: &Path) -> anyhow::Result<Self> {
        let runtime = runtime()?;
        let (stream, client) = runtime.block_on(async {
            let mut client = HealthClient::new(inpod_service::channel(socket));
            let stream = client.watch(HealthCheckRequest::default()).await?;
            Ok::<_, Status>((stream.into_inner(), client))
        })?;
        Ok(Self {
            runtime,
            stream,
            _client: client,
        })
    }

    /// Waits until the process reports this status.
    pub fn until(&mut self, status: ServingStatus) -> anyhow::Result<()> {
        let Self {
            runtime, stream, ..
        } = self;
        runtime.block_on(async {
            let reported = async {
                while let Some(response) = stream.message().await? {
                    if response.status() == status {
                        return Ok(());
                    }
                }
                anyhow::bail!("the stream ended")
            };
            tokio::time::timeout(LIMIT, reported).await?
        })
    }
}
