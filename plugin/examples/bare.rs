//! The baseline for the plugin's cold start (`integration/bench/run`): a tonic client with one call
//! over the `pod-events` socket.

use std::{env::args, error::Error, time::Duration};

use inpod_proto::{
    podevents::v1::{DeletePodRequest, pod_events_service_client::PodEventsServiceClient},
    types::v1::SandboxRef,
};
use tonic::{Request, transport::Endpoint};

fn main() -> Result<(), Box<dyn Error>> {
    let socket = args().nth(1).ok_or("which socket?")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("unix:{socket}"))?;
        let mut client = PodEventsServiceClient::new(endpoint.connect().await?);
        let mut request = Request::new(DeletePodRequest {
            sandbox: Some(SandboxRef {
                network_name: "podnet".to_owned(),
                container_id: "nobody-knows-it".to_owned(),
                ifname: "eth0".to_owned(),
            }),
            ..DeletePodRequest::default()
        });
        request.set_timeout(Duration::from_secs(5));
        client.delete_pod(request).await?;
        Ok(())
    })
}
