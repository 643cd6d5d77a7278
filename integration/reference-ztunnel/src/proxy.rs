//! Serves the listeners of a pod, and their connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::access_log::AccessLog;
use crate::dns;
use crate::enter::Inside;
use crate::forward::{Incoming, forward};
use crate::identity::Identity;
use crate::listeners::Listener;
use crate::mesh::Mesh;
use crate::options::{Fault, Options};
use crate::pods::Workload;

/// The pause after the kernel refused to accept a connection, for example for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The error text that follows stock ztunnel's "failure to start proxy : ".
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("Enter({0:?})")]
    Enter(io::Error),
    #[error("Bind({0}, {1:?})")]
    Bind(SocketAddr, io::Error),
    #[error("Identity({0:?})")]
    Identity(io::Error),
    #[error("refused by --fault nack-adds")]
    Fault,
}

pub(crate) struct Pod {
    pub(crate) uid: Arc<str>,
    pub(crate) inside: Inside,
    pub(crate) log: AccessLog,
    /// The pod's membership in the mesh; without a membership, all traffic is plaintext.
    pub(crate) member: Option<Member>,
    pub(crate) fault: Fault,
}

/// The membership of a pod in the mesh, which ends on drop.
pub(crate) struct Member {
    pub(crate) mesh: Arc<Mesh>,
    pub(crate) identity: Identity,
    /// The description of the pod that its peers receive.
    pub(crate) baggage: String,
    uid: Arc<str>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.mesh.leave(&self.uid);
    }
}

/// The proxy of a pod. Dropping the proxy closes the listeners and cuts the connections.
pub(crate) struct Proxy {
    listeners: JoinSet<()>,
    close: watch::Sender<bool>,
}

impl Proxy {
    pub(crate) async fn start(
        workload: &Workload,
        log: AccessLog,
        mesh: Option<Arc<Mesh>>,
        options: &Options,
    ) -> Result<Self, StartError> {
        let inside = Inside::enter(workload.netns.clone()).await;
        let inside = inside.map_err(StartError::Enter)?;
        let mut open = Vec::new();
        let fault = options.fault;
        for listener in Listener::ALL {
            if fault == Fault::TwoListeners && listener == Listener::Hbone {
                continue;
            }
            match bind(&inside, listener, fault).await {
                Ok(socket) => open.push((listener, socket)),
                Err(error) => {
                    if fault == Fault::PendingHalfOpen {
                        open.into_iter().for_each(std::mem::forget);
                    }
                    return Err(StartError::Bind(listener.address(), error));
                }
            }
        }
        let mut names = Vec::new();
        if options.dns {
            let opened = inside.run(|| Ok(dns::Sockets::open())).await;
            let opened = opened.map_err(StartError::Enter)?;
            names = opened.map_err(|(address, error)| StartError::Bind(address, error))?;
        }
        let uid = Arc::from(workload.uid.as_str());
        let member = mesh.map(|mesh| join(mesh, &uid, workload, &inside));
        let member = member.transpose().map_err(StartError::Identity)?;
        let pod = Pod {
            uid,
            inside,
            log,
            member,
            fault,
        };
        Ok(Self::serve(open, names, &Arc::new(pod)))
    }

    fn serve(open: Vec<(Listener, TcpListener)>, names: Vec<dns::Sockets>, pod: &Arc<Pod>) -> Self {
        let (close, closing) = watch::channel(false);
        let mut listeners = JoinSet::new();
        for (listener, socket) in open {
            listeners.spawn(accept(listener, socket, Arc::clone(pod), closing.clone()));
        }
        for sockets in names {
            let mut closing = closing.clone();
            listeners.spawn(async move {
                tokio::select! {
                    () = sockets.serve() => {}
                    _ = closing.changed() => {}
                }
            });
        }
        Self { listeners, close }
    }

    pub(crate) fn close(&self) {
        self.close.send_replace(true);
    }

    pub(crate) async fn finished(&mut self) {
        while self.listeners.join_next().await.is_some() {}
    }

    /// Closes the listeners and cuts the connections, because a Del grants no grace period. The listeners are closed on
    /// return.
    pub(crate) async fn stop(mut self) {
        self.listeners.shutdown().await;
    }
}

fn join(
    mesh: Arc<Mesh>,
    uid: &Arc<str>,
    workload: &Workload,
    inside: &Inside,
) -> io::Result<Member> {
    let info = &workload.info;
    Ok(Member {
        identity: mesh.join(uid, info, inside)?,
        baggage: format!(
            "k8s.namespace.name={},k8s.pod.name={}",
            info.namespace, info.name
        ),
        uid: Arc::clone(uid),
        mesh,
    })
}

async fn bind(inside: &Inside, listener: Listener, fault: Fault) -> io::Result<TcpListener> {
    let socket = if fault == Fault::ListenersInOwnNetns {
        listener.open(fault)?
    } else {
        inside.run(move || listener.open(fault)).await?
    };
    TcpListener::from_std(socket)
}

/// Serves a listener until it is closed, then waits for its connections, which end with this future.
async fn accept(
    listener: Listener,
    socket: TcpListener,
    pod: Arc<Pod>,
    mut closing: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = socket.accept(), if pod.fault != Fault::NeverAccepts => match accepted {
                Ok((stream, source)) => {
                    connections.spawn(forward(incoming(listener, stream, source), Arc::clone(&pod)));
                }
                Err(error) => rest(&error).await,
            },
            Some(_) = connections.join_next() => {}
            _ = closing.changed() => break,
        }
    }
    drop(socket);
    while connections.join_next().await.is_some() {}
}

fn incoming(listener: Listener, stream: TcpStream, source: SocketAddr) -> Incoming {
    Incoming {
        listener,
        stream,
        source,
    }
}

async fn rest(error: &io::Error) {
    tracing::warn!(%error, "failed to accept a connection");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}
