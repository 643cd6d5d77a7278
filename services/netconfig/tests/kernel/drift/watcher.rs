//! Watches drift and a netns's change counters.

use std::{
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use inpod_proto::{
    netconfig::v1::{NetnsState, StateComplete, WatchDriftRequest, watch_drift_response::Event},
    types::v1::SandboxRef,
};
use netlink_bindings::{
    nftables::{Nfgenmsg, OpGetgenDo, Request},
    traits::{NetlinkRequest as _, Protocol},
};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

use crate::harness::{Netconfig, wire};

/// Events after the initial state, with times.
#[derive(Clone, Default)]
pub(crate) struct Watcher(Arc<Mutex<Vec<(Instant, Event)>>>);

impl Watcher {
    /// Also returns the initial state.
    pub(crate) async fn open(netconfig: &mut Netconfig) -> (Vec<NetnsState>, Self) {
        let stream = netconfig.client.watch_drift(WatchDriftRequest {}).await;
        let mut stream = stream.unwrap().into_inner();
        let mut first = Vec::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(20), stream.message()).await;
            let event = next.unwrap().unwrap().unwrap().event.unwrap();
            if let Event::State(state) = event {
                first.push(state);
            } else if event == Event::StateComplete(StateComplete {}) {
                break;
            } else {
                let is_first = first.is_empty() && matches!(event, Event::InstanceId(_));
                assert!(is_first, "{event:?}");
            }
        }
        let watcher = Self::default();
        let reported = watcher.clone();
        tokio::spawn(async move {
            while let Ok(Some(message)) = stream.message().await {
                let event = message.event.unwrap();
                reported.0.lock().unwrap().push((Instant::now(), event));
            }
        });
        (first, watcher)
    }

    fn all(&self) -> Vec<(Instant, Event)> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn states(&self, name: &str) -> Vec<(Instant, NetnsState)> {
        let states = self.all().into_iter().filter_map(|(at, event)| {
            let Event::State(state) = event else {
                return None;
            };
            (state.sandbox == wire(name)).then_some((at, state))
        });
        states.collect()
    }

    pub(crate) fn ends(&self) -> Vec<Option<SandboxRef>> {
        let ends = self.all().into_iter().filter_map(|(_, event)| {
            let Event::ClaimReleased(released) = event else {
                return None;
            };
            Some(released.sandbox)
        });
        ends.collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.all().len()
    }

    /// Waits for this many states; returns the last.
    pub(crate) async fn wait_for_states(&self, name: &str, times: usize) -> NetnsState {
        let what = format!("{name} was not reported {times} times");
        eventually(&what, async || self.states(name).len() >= times).await;
        let states = self.states(name);
        assert_eq!(states.len(), times, "{states:?}");
        states.last().unwrap().1.clone()
    }
}

/// Waits longer than any delay of a report.
pub(crate) async fn quiet() {
    tokio::time::sleep(Duration::from_millis(1200)).await;
}

pub(crate) async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the packet filter's changes in the calling thread's netns, by any process (NFT_MSG_GETGEN).
pub(crate) fn generation() -> u32 {
    const HEADER_BYTES: usize = 16;
    const REQUEST: u16 = 1;
    let request = Request::new().op_getgen_do(&Nfgenmsg::new());
    let kind = match request.protocol() {
        Protocol::Raw { request_type, .. } => request_type,
        Protocol::Generic(_) => 0,
    };
    let length = u32::try_from(HEADER_BYTES + request.payload().len()).unwrap();
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(request.payload());
    let fd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    );
    let fd = fd.unwrap();
    send(fd.as_raw_fd(), &message, MsgFlags::empty()).unwrap();
    let mut answer = [0; 256];
    let length = recv(fd.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
    let payload = answer.get(HEADER_BYTES..length).unwrap();
    OpGetgenDo::decode_reply(payload).1.get_id().unwrap()
}
