//! Cases about ztunnel's listeners in a pod.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    bench::Bench,
    network::{Network, UID, connect},
    session::Session,
};
use crate::{
    case::{Case, Outcome, check, failed},
    netns::PORTS,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "listeners-on-every-address",
        about: "Each listener can be reached on loopback and on the pod's addresses, of both families.",
        rules: &["D4"],
        run: |bench| {
            let (_session, network) = serving(bench)?;
            wildcard(&network)?;
            connect_to_all(bench, &network).map(drop)
        },
    },
    Case {
        name: "connections-are-accepted",
        about: "Each listener accepts connections, while earlier ones stay open without data.",
        rules: &["D5"],
        run: connections_are_accepted,
    },
    Case {
        name: "ports-can-be-shared",
        about: "A second ztunnel of the same user can open the same ports.",
        rules: &["D6"],
        run: ports_can_be_shared,
    },
];

/// The time for the kernel to put a connection on the accept queue.
const QUEUED: Duration = Duration::from_millis(20);

/// The number of rounds of connections; all connections stay open.
const ROUNDS: usize = 4;

/// Starts agent and ztunnel, and adds a pod with addresses of both families and without redirections.
fn serving(bench: &mut Bench) -> Outcome<(Session, Network)> {
    let network = Network::make(bench.deadline())?;
    // Rule D2 is not the subject of these cases, and a ztunnel that calls itself does not get to its other connections.
    network.stop_loops()?;
    let session = bench.live()?;
    session.add(UID, &network.pod)?;
    bench.served(&network.pod, "after Add")?;
    Ok((session, network))
}

/// Fails unless each port has a listener on `::`, or on `0.0.0.0` and nothing else in a pod without IPv6.
fn wildcard(network: &Network) -> Outcome {
    let has_ipv6 = network.pod.has_ipv6();
    let found = network.pod.listening()?;
    for port in PORTS {
        let addresses = found.iter().filter(|found| found.port == port);
        let addresses: Vec<_> = addresses.map(|found| found.address).collect();
        let wanted: &[IpAddr] = if has_ipv6 {
            &[IpAddr::V6(Ipv6Addr::UNSPECIFIED)]
        } else {
            &[
                IpAddr::V6(Ipv6Addr::UNSPECIFIED),
                IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            ]
        };
        let expected = format!("a listener of port {port} on all addresses of both families");
        check(
            wanted.iter().any(|wanted| addresses.contains(wanted)),
            &expected,
            || format!("listeners on {addresses:?}"),
        )?;
    }
    Ok(())
}

/// Connects once to each listener on each address of the pod.
fn connect_to_all(bench: &Bench, network: &Network) -> Outcome<Vec<TcpStream>> {
    let mut streams = Vec::new();
    for pair in network.pairs() {
        let loopback: IpAddr = match pair.pod {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        for (netns, address) in [
            (&network.pod, loopback),
            (&network.pod, pair.pod),
            (&network.client, pair.pod),
        ] {
            for port in PORTS {
                let (to, deadline) = (SocketAddr::new(address, port), bench.deadline());
                match netns.run(move || connect(0, to, deadline)) {
                    Ok(stream) => streams.push(stream),
                    Err(error) => {
                        return failed(format!("a connection to {to}"), error.to_string());
                    }
                }
            }
        }
    }
    Ok(streams)
}

fn connections_are_accepted(bench: &mut Bench) -> Outcome {
    let (_session, network) = serving(bench)?;
    let mut streams = Vec::new();
    for _ in 0..ROUNDS {
        streams.extend(connect_to_all(bench, &network)?);
        accepted(bench, &network, streams.len())?;
    }
    Ok(())
}

/// Fails unless ztunnel accepts all connections within the deadline. A successful connect proves nothing, because the
/// kernel completes the handshake before the accept.
fn accepted(bench: &Bench, network: &Network, connections: usize) -> Outcome {
    let end = Instant::now() + bench.deadline();
    loop {
        thread::sleep(QUEUED);
        let waiting = network.pod.unaccepted()?;
        if waiting.is_empty() {
            return Ok(());
        }
        if Instant::now() >= end {
            let expected = format!("ztunnel accepts each of {connections} connections");
            return failed(expected, format!("connections that wait: {waiting:?}"));
        }
    }
}

fn ports_can_be_shared(bench: &mut Bench) -> Outcome {
    let (_session, network) = serving(bench)?;
    for found in network.pod.listening()? {
        if PORTS.contains(&found.port) {
            let shared = network.pod.share(found);
            shared.or_else(|error| {
                failed(
                    format!("a second listener on port {} with SO_REUSEPORT", found.port),
                    error.to_string(),
                )
            })?;
        }
    }
    Ok(())
}
