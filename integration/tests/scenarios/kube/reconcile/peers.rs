//! A peer continuously tries tunnels to a pod's ztunnel while the pod joins and leaves.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use integration::source_seen;
use serde_json::json;

use super::*;
use crate::kube::reconcile::traffic::{
    PERIOD, ROUNDS, assert_captured_inside, assert_none_failed, pair, toggle,
};
use integration::clients::Clients;

/// Shorter than the pod's stay in the mesh.
const STEP: Duration = Duration::from_secs(1);

/// Outcome of a peer's connection to ztunnel in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tunnel {
    /// Refused as before the pod joined.
    Refused,
    /// ztunnel forwarded it to the application.
    Forwarded,
    /// Expected neither before nor after.
    Otherwise(String),
}

struct Peer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, Tunnel)>>,
}

impl Peer {
    fn start(netns: &Path, to: IpAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let netns = Netns::open(netns, &["/run/netns".into()]).unwrap();
        let tunnels = move || {
            let mut all = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let at = Instant::now();
                all.push((at, tunnel(to)));
                thread::sleep(PERIOD.saturating_sub(at.elapsed()));
            }
            all
        };
        let thread = thread::spawn(move || netns.within(tunnels).unwrap());
        Self { stop, thread }
    }

    fn stop(self) -> Vec<(Instant, Tunnel)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn tunnel(to: IpAddr) -> Tunnel {
    let address = SocketAddr::new(to, 15008);
    let stream = match TcpStream::connect_timeout(&address, STEP) {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Tunnel::Refused,
        Err(error) => return Tunnel::Otherwise(format!("cannot connect: {error}")),
    };
    match ask_through(stream, to) {
        Ok(_) => Tunnel::Forwarded,
        Err(error) => Tunnel::Otherwise(format!("{error:#}")),
    }
}

/// Returns the source that the application saw through ztunnel.
fn ask_through(mut stream: TcpStream, to: IpAddr) -> anyhow::Result<IpAddr> {
    stream.set_read_timeout(Some(STEP))?;
    let target = SocketAddr::new(to, PORT);
    write!(stream, "CONNECT {target} HTTP/1.1\r\n\r\n")?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    ensure!(head.starts_with(b"HTTP/1.1 200"), "{head:?}");
    Ok(source_seen(stream)?.0)
}

// scenario: 6
#[test]
fn a_peer_that_tries_tunnels_all_the_time_finds_what_was_before_or_what_comes_after() {
    let (cluster, web, outsider, _apps) = pair(&json!({}));
    let peers = web.addresses().map(|to| Peer::start(outsider.path(), to));
    let clients = Clients::start(&[&outsider], SocketAddr::new(web.v4.into(), PORT), PERIOD);
    let times = toggle(&cluster, &web, || clients.make(150).unwrap());
    let attempts = clients.stop().unwrap();
    let log = cluster.node.accesses().unwrap();
    assert_none_failed(&attempts, &times);
    assert_captured_inside(&attempts, &log, 15006, &times);
    for peer in peers {
        let tunnels = peer.stop();
        let within = |is_meant: &dyn Fn(Instant) -> bool| -> Vec<Tunnel> {
            let meant = tunnels.iter().filter(|(at, _)| is_meant(*at));
            meant.map(|(_, tunnel)| tunnel.clone()).collect()
        };
        let inside = within(&|at| times.is_inside(at));
        assert!(
            inside.len() > 20 && inside.iter().all(|it| *it == Tunnel::Forwarded),
            "{inside:?}"
        );
        let outside = within(&|at| times.is_outside(at));
        assert!(
            outside.len() > 20 && outside.iter().all(|it| *it == Tunnel::Refused),
            "{outside:?}"
        );
        for span in &times.joining {
            // Outcomes of before, then of after. In between ztunnel listens without the rules that let it answer; no
            // peer is informed of the pod by then.
            let joining = within(&|at| span.0 < at && at < span.1);
            let refused = joining.iter().take_while(|it| **it == Tunnel::Refused);
            let led = joining
                .iter()
                .rev()
                .take_while(|it| **it == Tunnel::Forwarded);
            let between = &joining[refused.count()..joining.len() - led.count()];
            let is_otherwise = |it: &Tunnel| matches!(it, Tunnel::Otherwise(_));
            assert!(
                between.len() <= 2 && between.iter().all(is_otherwise),
                "{joining:?}"
            );
        }
        let broken = tunnels
            .iter()
            .filter(|(at, tunnel)| matches!(tunnel, Tunnel::Otherwise(_)) && times.is_leaving(*at));
        // A tunnel that opens just when ztunnel closes its listener, after peers were informed.
        assert!(broken.count() <= ROUNDS, "{tunnels:?}");
    }
}
