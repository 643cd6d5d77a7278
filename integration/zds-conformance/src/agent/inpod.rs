//! Drives inpod's broker by gRPC, and plays the netconfig that hands out descriptors.

mod netconfig;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use inpod_proto::{
    types::v1::{NetnsId, SandboxRef, WorkloadInfo},
    ztunnelbroker::v1::{
        self as broker, AddWorkloadRequest, ListWorkloadsRequest, RemoveWorkloadRequest,
        SetWorkloadsRequest, ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
    },
};
use tokio::{runtime::Handle, task::JoinHandle};
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint},
};

use super::driver::{Driver, Refusal, Workload};
use netconfig::{Book, serve};

/// The time limit of a call that waits for no ztunnel.
const CALL: Duration = Duration::from_secs(10);

/// The interval between attempts to reach a starting broker.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Inpod {
    runtime: Handle,
    channel: Channel,
    revisions: AtomicU64,
    instance: Mutex<String>,
    book: Arc<Mutex<Book>>,
    netconfig: JoinHandle<()>,
}

impl Inpod {
    /// Returns a driver that serves `netns/netns.sock` below this `run_dir`.
    pub fn new(runtime: &Handle, run_dir: &Path) -> Result<Self, Refusal> {
        let socket = run_dir.join("ztunnel-broker/grpc.sock");
        let within = runtime.enter();
        let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()));
        let channel = endpoint.map_err(|error| error.to_string())?.connect_lazy();
        let book = Arc::new(Mutex::new(BTreeMap::new()));
        let listener =
            netconfig::listen(run_dir).map_err(|error| format!("netns.sock: {error}"))?;
        let netconfig = runtime.spawn(serve(listener, Arc::clone(&book)));
        drop(within);
        Ok(Self {
            runtime: runtime.clone(),
            channel,
            revisions: AtomicU64::new(0),
            instance: Mutex::default(),
            book,
            netconfig,
        })
    }

    fn client(&self) -> ZtunnelBrokerServiceClient<Channel> {
        ZtunnelBrokerServiceClient::new(self.channel.clone())
    }

    fn instance(&self) -> String {
        self.instance
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn revision(&self) -> u64 {
        self.revisions
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// Records the claim of the workload for netconfig, and returns the workload for the broker.
    fn claim_workload(&self, workload: &Workload) -> broker::Workload {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = &workload.netns {
            book.insert(place.inode, place.clone());
        }
        let sandbox = sandbox(
            &workload.uid,
            workload.netns.as_ref().map(|place| place.inode),
        );
        broker::Workload {
            sandbox: Some(sandbox),
            uid: workload.uid.clone(),
            info: Some(WorkloadInfo {
                name: workload.name.clone(),
                namespace: workload.namespace.clone(),
                service_account: workload.service_account.clone(),
            }),
            netns: workload.netns.as_ref().map(|place| NetnsId {
                device: place.device,
                inode: place.inode,
                cookie: place.inode,
            }),
            revision: self.revision(),
        }
    }

    async fn list(&self) -> Result<broker::ListWorkloadsResponse, Status> {
        let request = limited(ListWorkloadsRequest {}, CALL);
        self.client()
            .list_workloads(request)
            .await
            .map(tonic::Response::into_inner)
    }

    async fn await_instance(&self, within: Duration) -> Result<String, Refusal> {
        let end = Instant::now() + within;
        loop {
            match self.list().await {
                Ok(list) if list.instance_id != self.instance() => return Ok(list.instance_id),
                Ok(_) if Instant::now() >= end => {
                    return Err("the broker was not started anew".to_owned());
                }
                Err(error) if Instant::now() >= end => return Err(refusal(&error)),
                Ok(_) | Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    }
}

/// Returns the sandbox of a pod for its netns: a sandbox never changes its netns, so another netns means another
/// sandbox.
fn sandbox(uid: &str, inode: Option<u64>) -> SandboxRef {
    let container_id = match inode {
        Some(inode) => format!("{uid}-{inode}"),
        None => format!("{uid}-unknown"),
    };
    SandboxRef {
        network_name: "conformance".to_owned(),
        container_id,
        ifname: "eth0".to_owned(),
    }
}

fn limited<T>(message: T, time: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(time);
    request
}

fn refusal(status: &Status) -> Refusal {
    format!("{}: {}", status.code(), status.message())
}

impl Driver for Inpod {
    fn begin(&self, within: Duration) -> Result<(), Refusal> {
        let instance = self.runtime.block_on(self.await_instance(within))?;
        *self.instance.lock().unwrap_or_else(PoisonError::into_inner) = instance;
        Ok(())
    }

    fn seed(&self, all: &[Workload]) -> Result<(), Refusal> {
        let workloads = all
            .iter()
            .map(|workload| self.claim_workload(workload))
            .collect();
        let request = SetWorkloadsRequest {
            instance_id: self.instance(),
            revision: self.revision(),
            workloads,
        };
        let (mut client, request) = (self.client(), limited(request, CALL));
        let called = self.runtime.block_on(client.set_workloads(request));
        called.map(drop).map_err(|status| refusal(&status))
    }

    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal> {
        let request = AddWorkloadRequest {
            instance_id: self.instance(),
            workload: Some(self.claim_workload(workload)),
        };
        let (mut client, request) = (self.client(), limited(request, within));
        let called = self.runtime.block_on(client.add_workload(request));
        called.map(drop).map_err(|status| refusal(&status))
    }

    fn remove(&self, uid: &str) -> Result<(), Refusal> {
        let listed = self
            .runtime
            .block_on(self.list())
            .map_err(|status| refusal(&status))?;
        let of_pod = listed
            .workloads
            .into_iter()
            .filter_map(|status| status.workload);
        for workload in of_pod.filter(|workload| workload.uid == uid) {
            let request = RemoveWorkloadRequest {
                instance_id: self.instance(),
                sandbox: workload.sandbox,
                revision: self.revision(),
            };
            let (mut client, request) = (self.client(), limited(request, CALL));
            let called = self.runtime.block_on(client.remove_workload(request));
            called.map_err(|status| refusal(&status))?;
        }
        Ok(())
    }

    fn can_withhold_netns(&self) -> bool {
        true
    }
}

impl Drop for Inpod {
    fn drop(&mut self) {
        self.netconfig.abort();
    }
}
