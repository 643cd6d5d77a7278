use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use inpod_proto::ztunnelbroker::v1::{
    self as wire,
    ztunnel_broker_service_server::{ZtunnelBrokerService, ZtunnelBrokerServiceServer},
};
use inpod_types::Reason;
use tokio::{net::UnixListener, sync::watch, time::timeout};
use tonic::{Request, Response, Status, transport};

use super::*;
use crate::{
    checkpoint::Checkpoint,
    clients::Clients,
    pipeline::{Revisions, Synced},
    testing::{capture, record},
};

/// A broker whose ztunnel never acknowledges a workload.
struct Waiting;

fn no_part<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no part of the test"))
}

#[tonic::async_trait]
impl ZtunnelBrokerService for Waiting {
    type WatchSessionsStream =
        Pin<Box<dyn Stream<Item = Result<wire::WatchSessionsResponse, Status>> + Send>>;

    async fn set_workloads(
        &self,
        _: Request<wire::SetWorkloadsRequest>,
    ) -> Result<Response<wire::SetWorkloadsResponse>, Status> {
        no_part()
    }

    async fn add_workload(
        &self,
        _: Request<wire::AddWorkloadRequest>,
    ) -> Result<Response<wire::AddWorkloadResponse>, Status> {
        std::future::pending().await
    }

    async fn remove_workload(
        &self,
        _: Request<wire::RemoveWorkloadRequest>,
    ) -> Result<Response<wire::RemoveWorkloadResponse>, Status> {
        Ok(Response::new(wire::RemoveWorkloadResponse::default()))
    }

    async fn set_ztunnels(
        &self,
        _: Request<wire::SetZtunnelsRequest>,
    ) -> Result<Response<wire::SetZtunnelsResponse>, Status> {
        no_part()
    }

    async fn list_workloads(
        &self,
        _: Request<wire::ListWorkloadsRequest>,
    ) -> Result<Response<wire::ListWorkloadsResponse>, Status> {
        no_part()
    }

    async fn watch_sessions(
        &self,
        _: Request<wire::WatchSessionsRequest>,
    ) -> Result<Response<Self::WatchSessionsStream>, Status> {
        no_part()
    }
}

fn pipeline(directory: &Path) -> Pipeline {
    let socket = directory.join("grpc.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let incoming = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    let server = transport::Server::builder().add_service(ZtunnelBrokerServiceServer::new(Waiting));
    tokio::spawn(server.serve_with_incoming(incoming));
    let synced = Synced {
        netconfig: Some(Arc::from("netconfig")),
        broker: Some(Arc::from("broker")),
    };
    let unreachable = inpod_service::channel(&directory.join("nobody.sock"));
    Pipeline {
        clients: Clients::new(unreachable, inpod_service::channel(&socket), capture()),
        checkpoint: Checkpoint::open(&directory.join("pods")).unwrap(),
        synced: watch::channel(synced).1,
        revisions: Revisions::default(),
    }
}

#[tokio::test]
async fn the_wait_for_a_ztunnel_is_given_up_when_something_else_of_the_pod_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    let pipeline = pipeline(dir.path());
    let (mut record, mut log) = (record("a"), Timeline::default());
    let cancelled = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        CancelReason::Interrupted
    };
    let readded = pipeline.readd_workload(&mut record, &mut log, cancelled);
    // The caller of a DEL waits five seconds.
    let readded = timeout(Duration::from_secs(20), readded).await;
    let failure = readded.expect("it waits on").unwrap_err();
    assert_eq!(failure.reason, Reason::Starting, "{failure}");
}
