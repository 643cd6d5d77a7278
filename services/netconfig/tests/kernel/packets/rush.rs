//! Clients that connect as fast as they can during enrollment and withdrawal: no connection is
//! refused, cut or unanswered.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use netconfig::{
    Family,
    apply::Phase,
    inspect,
    rules::{Ambient, Ipv6},
};
use socket2::{Domain, Socket, Type};

use crate::packets::{
    probe::{PATIENCE, SetOnDrop},
    stand_in::{Answer, By},
    world::{Place, Pod, World, outside, pod},
};

const ROUNDS: usize = 8;

/// Connections of each kind between two changes.
const BETWEEN: usize = 40;

const DEADLINE: Duration = Duration::from_secs(60);

/// Client ports: few, so that each meets the rules of several rounds; enough that none recurs during one enrollment,
/// since a port reused at once may meet its last connection's conntrack entry.
const PORTS: &str = "20000 21999";

struct Client {
    at: Place,
    to: IpAddr,
    /// The origin of reported times.
    since: Instant,
    count: AtomicUsize,
    /// Since the last call of `assert_answered`.
    heard: Mutex<Vec<Result<By, String>>>,
}

impl Client {
    fn new(at: Place, to: IpAddr, since: Instant) -> Self {
        Self {
            at,
            to,
            since,
            count: AtomicUsize::new(0),
            heard: Mutex::default(),
        }
    }

    /// Must answer if these families are captured.
    fn wanted(&self, captured: &[Family]) -> By {
        let is_captured = captured.contains(&family_of(self.to));
        match (self.at, is_captured) {
            (Place::Outside, true) => By::Ztunnel(15006),
            (Place::Outside, false) => By::Application,
            (_, true) => By::Ztunnel(15001),
            (_, false) => By::Outside,
        }
    }

    fn run(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let heard = exchange(SocketAddr::new(self.to, 8080));
            let heard = heard.map_err(|error| {
                let (at, to, took) = (self.at, self.to, began.elapsed());
                let from = began.duration_since(self.since);
                format!("{at:?} to {to}, begun at {from:?}: {error} after {took:?}")
            });
            self.heard.lock().unwrap().push(heard);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() {
        Family::V4
    } else {
        Family::V6
    }
}

/// The port is free again at once.
fn exchange(to: SocketAddr) -> io::Result<By> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut stream = BufReader::new(TcpStream::from(socket));
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let answer = Answer::parse(&line).ok_or_else(|| io::Error::other(format!("heard {line:?}")))?;
    stream.get_mut().write_all(b"hello\n")?;
    line.clear();
    stream.read_line(&mut line)?;
    if line == format!("{} hello\n", answer.by) {
        Ok(answer.by)
    } else {
        Err(io::Error::other(format!("heard {line:?}")))
    }
}

/// Returns `TCPSynRetrans` of the calling thread's netns.
fn syns_sent_again() -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
    let mut lines = counters.lines().filter(|line| line.starts_with("TcpExt:"));
    let names = lines.next().unwrap().split(' ');
    let mut values = names.zip(lines.next().unwrap().split(' '));
    let (_, value) = values.find(|(name, _)| *name == "TCPSynRetrans").unwrap();
    value.parse().unwrap()
}

fn wait_for_more(clients: &[Client]) {
    let deadline = Instant::now() + DEADLINE;
    let count = |client: &Client| client.count.load(Ordering::Relaxed);
    let least: Vec<_> = clients.iter().map(|it| count(it) + BETWEEN).collect();
    while clients
        .iter()
        .zip(&least)
        .any(|(it, least)| count(it) < *least)
    {
        assert!(Instant::now() < deadline, "a client makes no progress");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Discards earlier answers, but not failures. Later ones must come from ztunnel for
/// captured families, else directly.
fn assert_answered(clients: &[Client], failures: &mut Vec<String>, captured: &[Family]) {
    let drain = |failures: &mut Vec<String>| {
        let mut by = Vec::new();
        for client in clients {
            for one in std::mem::take(&mut *client.heard.lock().unwrap()) {
                match one {
                    Ok(found) => by.push((client, found)),
                    Err(error) => failures.push(error),
                }
            }
        }
        by
    };
    // A connection of before may end after the change.
    wait_for_more(clients);
    drain(failures);
    wait_for_more(clients);
    for (client, found) in drain(failures) {
        let (at, to, wanted) = (client.at, client.to, client.wanted(captured));
        if found != wanted {
            failures.push(format!("{at:?} to {to}: answered by {found}, not {wanted}"));
        }
    }
}

/// Waits until the final removal would cut nothing.
fn wait_for_the_end_of_what_is_captured(world: &World) {
    let deadline = Instant::now() + DEADLINE;
    while inspect::captured_flows(&world.pod.netns).unwrap() > 0 {
        assert!(Instant::now() < deadline, "captured connections do not end");
    }
}

/// One redirection after another, then the withdrawal.
fn enroll_and_withdraw(
    world: &World,
    clients: &[Client],
    enrolled: &[(Ambient, &[Family])],
) -> Vec<String> {
    let mut failures = Vec::new();
    let mut changes = String::new();
    let mut change = |what: &str, act: &dyn Fn()| {
        let from = clients[0].since.elapsed();
        act();
        changes += &format!("{what} {from:?} to {:?}; ", clients[0].since.elapsed());
    };
    for _ in 0..ROUNDS {
        assert_answered(clients, &mut failures, &[]);
        for (settings, captured) in enrolled {
            change("apply", &|| {
                world.apply(settings);
            });
            assert_answered(clients, &mut failures, captured);
        }
        change("drain", &|| {
            world.remove(Phase::Drain);
        });
        assert_answered(clients, &mut failures, &[]);
        wait_for_the_end_of_what_is_captured(world);
        change("removal", &|| {
            world.remove(Phase::Final);
        });
    }
    assert_answered(clients, &mut failures, &[]);
    if !failures.is_empty() {
        failures.push(changes);
    }
    failures
}

#[test]
fn of_clients_that_connect_as_fast_as_they_can_none_fails_when_a_pod_is_enrolled_or_withdrawn() {
    none_fails(&[(Ambient::default(), &Family::ALL)]);
}

/// With a single family's table, tracking has not seen IPv6 connections begin.
#[test]
fn of_clients_that_connect_as_fast_as_they_can_none_fails_when_an_enrolled_pods_ipv6_is_captured_too()
 {
    let without = Ambient {
        ipv6: Ipv6::Off,
        ..Ambient::default()
    };
    none_fails(&[(without, &[Family::V4]), (Ambient::default(), &Family::ALL)]);
}

fn none_fails(enrolled: &[(Ambient, &[Family])]) {
    let world = World::new(Pod::Dual);
    for place in [Place::Pod, Place::Outside] {
        world.at(place).run(|| {
            std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", PORTS).unwrap();
        });
    }
    let since = Instant::now();
    let clients = [Family::V4, Family::V6].map(|family| {
        [
            Client::new(Place::Outside, pod(family), since),
            Client::new(Place::Pod, outside(family), since),
        ]
    });
    let clients = clients.into_iter().flatten().collect::<Vec<_>>();
    let stop = AtomicBool::new(false);
    let mut failures = thread::scope(|scope| {
        for client in &clients {
            let netns = &world.at(client.at).netns;
            scope.spawn(|| netns.within(|| client.run(&stop)).unwrap());
        }
        let _stop = SetOnDrop(&stop);
        enroll_and_withdraw(&world, &clients, enrolled)
    });
    for place in [Place::Pod, Place::Outside] {
        let resent = world.at(place).run(syns_sent_again);
        failures.extend((resent > 0).then(|| format!("{place:?}: {resent} SYNs were lost")));
    }
    let made: usize = clients
        .iter()
        .map(|it| it.count.load(Ordering::Relaxed))
        .sum();
    println!("{made} connections in {ROUNDS} rounds");
    assert_eq!(failures, [""; 0], "of {made}");
}
