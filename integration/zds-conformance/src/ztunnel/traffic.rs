//! Cases about connections that Istio's rules redirect to ztunnel's listeners.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{
    bench::Bench,
    network::{self, Direction, Forwarded, Network, UID},
    session::Session,
};
use crate::{
    case::{Case, Outcome, check, failed},
    wire,
};

pub(super) const CASES: &[Case<Bench>] = &[
    Case {
        name: "inbound-connections-are-forwarded",
        about: "An inbound connection reaches the application, which sees the client's address.",
        rules: &["D1", "D2", "D3"],
        run: inbound_connections_are_forwarded,
    },
    Case {
        name: "outbound-connections-are-forwarded",
        about: "A connection of the application reaches the dialed server, over marked sockets.",
        rules: &["D1", "D2"],
        run: outbound_connections_are_forwarded,
    },
    Case {
        name: "half-closes-are-forwarded",
        about: "A server that answers at the end of a request sees the end, and its answer arrives.",
        rules: &["D2"],
        run: half_closes_are_forwarded,
    },
    Case {
        name: "direct-connections-are-closed",
        about: "A connection to a listener itself, without a redirection, is closed, because forwarding would loop.",
        rules: &["D2"],
        run: direct_connections_are_closed,
    },
    Case {
        name: "del-ends-connections",
        about: "The connections of a deleted pod end.",
        rules: &["D8"],
        run: del_ends_connections,
    },
    Case {
        name: "move-ends-connections",
        about: "The connections of a pod that moves to another network namespace end.",
        rules: &["D8"],
        run: move_ends_connections,
    },
    Case {
        name: "connections-outlive-the-agent",
        about: "The end of a connection to the agent ends no connection of a pod.",
        rules: &["D8", "Z13"],
        run: connections_outlive_the_agent,
    },
];

/// Starts agent and ztunnel, and adds a pod with a client and redirected connections.
fn carrying(bench: &mut Bench) -> Outcome<(Session, Network)> {
    let network = Network::make(bench.deadline())?;
    network.redirect()?;
    let session = bench.live()?;
    session.add(UID, &network.pod)?;
    Ok((session, network))
}

fn inbound_connections_are_forwarded(bench: &mut Bench) -> Outcome {
    let (_session, network) = carrying(bench)?;
    for pair in network.pairs() {
        let source = network.forward(Direction::Inbound, pair)?.source;
        let expected = format!("the application sees the client's address {}", pair.client);
        check(source == pair.client, &expected, || source.to_string())?;
    }
    Ok(())
}

fn outbound_connections_are_forwarded(bench: &mut Bench) -> Outcome {
    let (_session, network) = carrying(bench)?;
    for pair in network.pairs() {
        network.forward(Direction::Outbound, pair)?;
    }
    Ok(())
}

fn half_closes_are_forwarded(bench: &mut Bench) -> Outcome {
    let (_session, network) = carrying(bench)?;
    open(&network)?
        .into_iter()
        .try_for_each(Forwarded::half_close)
}

fn direct_connections_are_closed(bench: &mut Bench) -> Outcome {
    let (_session, network) = carrying(bench)?;
    let deadline = bench.deadline();
    for pair in network.pairs() {
        let loopback: IpAddr = match pair.pod {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        // Stock ztunnel calls itself after a connection of the pod to its own address on port 15001.
        for (netns, address, port) in [
            (&network.pod, loopback, 15001),
            (&network.pod, loopback, 15006),
            (&network.client, pair.pod, 15001),
            (&network.client, pair.pod, 15006),
        ] {
            let to = SocketAddr::new(address, port);
            let stream = netns.run(move || network::connect(0, to, deadline));
            let stream = stream
                .or_else(|error| failed(format!("ztunnel accepts {to}"), error.to_string()))?;
            let closed =
                network::closed(stream, &format!("the end of a connection to {to} itself"));
            let looped = network.counter("looped")?;
            let expected = format!("no connection by which ztunnel forwards one to {to} itself");
            check(looped == 0, &expected, || {
                format!("{looped} connections of ztunnel to its own listeners")
            })?;
            closed?;
        }
    }
    Ok(())
}

/// Opens connections in both directions and families.
fn open(network: &Network) -> Outcome<Vec<Forwarded>> {
    let mut live = Vec::new();
    for pair in network.pairs() {
        live.push(network.forward(Direction::Inbound, pair)?);
        live.push(network.forward(Direction::Outbound, pair)?);
    }
    Ok(live)
}

fn del_ends_connections(bench: &mut Bench) -> Outcome {
    let (session, network) = carrying(bench)?;
    let mut live = open(&network)?;
    session.ok(wire::del(UID))?;
    bench.unserved(&network.pod, "after Del")?;
    live.iter_mut()
        .try_for_each(|connection| connection.ended(bench.deadline(), "after the Del of its pod"))
}

fn move_ends_connections(bench: &mut Bench) -> Outcome {
    let (session, network) = carrying(bench)?;
    let mut live = open(&network)?;
    let other = bench.pod()?;
    session.add(UID, &other)?;
    bench.unserved(&network.pod, "whose workload has moved to another netns")?;
    live.iter_mut()
        .try_for_each(|connection| connection.ended(bench.deadline(), "after the move of its pod"))
}

fn connections_outlive_the_agent(bench: &mut Bench) -> Outcome {
    let (session, network) = carrying(bench)?;
    let mut live = open(&network)?;
    drop(session);
    let session = bench.reconnected()?;
    session.ok(wire::keep(UID))?;
    session.ok(wire::snapshot_sent())?;
    live.iter_mut()
        .try_for_each(|connection| connection.exchange("after a reconnect"))
}
