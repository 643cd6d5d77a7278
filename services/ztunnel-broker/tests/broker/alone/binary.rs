//! Tests of the binary: its sockets, RPCs and shutdown. Time is real.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use inpod_proto::{
    failure_of,
    ztunnelbroker::v1::{
        AddWorkloadRequest, AddWorkloadResponse, ListWorkloadsRequest, SetWorkloadsRequest,
        ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
    },
};
use inpod_types::Reason;
use nix::{sys::signal, unistd::Pid};
use tokio::time::{Instant, sleep};
use tonic::{Request, Response, Status, transport::Channel};

use crate::bench::{SOON, Ztunnel, describe, netconfig_at, workload};

type Client = ZtunnelBrokerServiceClient<Channel>;

struct Broker(Child);

impl Broker {
    fn start(dir: &Path) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_ztunnel-broker"))
            .arg("--run-dir")
            .arg(dir)
            .arg("--zds-socket")
            .arg(dir.join("ztunnel.sock"))
            .args([
                "--peer",
                "uid",
                "--ztunnel-peer",
                "uid",
                "--log-level",
                "error",
            ])
            .stdin(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn terminate(&self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        signal::kill(pid, signal::Signal::SIGTERM).unwrap();
    }

    async fn exit_code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + SOON;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("it did not stop");
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

async fn instance_id(client: &mut Client) -> String {
    let deadline = Instant::now() + SOON;
    loop {
        match client.list_workloads(ListWorkloadsRequest {}).await {
            Ok(list) => return list.into_inner().instance_id,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

async fn set(client: &mut Client, instance_id: &str) {
    let request = SetWorkloadsRequest {
        instance_id: instance_id.to_owned(),
        revision: 1,
        workloads: vec![],
    };
    client.set_workloads(request).await.unwrap();
}

async fn add(
    mut client: Client,
    instance_id: String,
    revision: u64,
    time: Duration,
) -> Result<Response<AddWorkloadResponse>, Status> {
    let workload = workload(
        &format!("c{revision}"),
        &format!("p{revision}"),
        0,
        revision,
    );
    let mut request = Request::new(AddWorkloadRequest {
        instance_id,
        workload: Some((&workload).into()),
    });
    request.set_timeout(time);
    client.add_workload(request).await
}

#[tokio::test]
async fn the_broker_serves_its_callers_and_its_ztunnel_and_stops_without_a_message() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("netns")).unwrap();
    let on = Arc::new(AtomicBool::new(true));
    let netconfig = netconfig_at(&dir.path().join("netns/netns.sock"), &on);
    let mut broker = Broker::start(dir.path());
    let channel = inpod_service::channel(&inpod_service::socket(dir.path(), "ztunnel-broker"));
    let mut client = Client::new(channel);
    let id = instance_id(&mut client).await;
    set(&mut client, &id).await;

    let start = Instant::now();
    let time = Duration::from_secs(2);
    let error = add(client.clone(), id.clone(), 1, time).await.unwrap_err();
    assert_eq!(failure_of(&error).reason, Reason::ZtunnelNeverConnected);
    assert!(
        start.elapsed() < time,
        "it answers before its caller gives up"
    );

    let ztunnel = Ztunnel::connect(&dir.path().join("ztunnel.sock")).await;
    ztunnel.send(b"\x08\x01").await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p1");
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
    let adding = tokio::spawn(add(client.clone(), id.clone(), 2, SOON));
    assert_eq!(describe(&ztunnel.ack_next().await), "add p2");
    assert_eq!(adding.await.unwrap().unwrap().into_inner().session_id, 1);

    let adding = tokio::spawn(add(client.clone(), id, 3, SOON));
    assert_eq!(describe(&ztunnel.next().await.0), "add p3");
    broker.terminate();
    assert!(ztunnel.hung_up(SOON).await);
    assert!(adding.await.unwrap().is_err());
    assert_eq!(broker.exit_code().await, Some(0));
    netconfig.abort();
}
