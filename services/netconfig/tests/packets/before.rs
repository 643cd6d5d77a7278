//! Connections that nothing captured when they began: rules came later, were torn out, or were those of a withdrawal.
//! They have a second to end, and none goes past ztunnel for good; what ztunnel carries goes on.

use std::{
    collections::VecDeque,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use netconfig::{
    Backend, Family,
    apply::Phase,
    rules::{Ambient, Ipv6},
};

use crate::{
    checks::FROM_ZTUNNEL,
    matrix::{HANDS, scenario},
    probe::{Dial, Flow, PATIENCE, at_once},
    stand_in::By,
    world::{BACKENDS, Place, Pod, World, either, outside, pod},
};

/// What a connection from before has is a second; so much of it is seen also where everything is slow.
pub(crate) const MOST_OF_A_SECOND: Duration = Duration::from_millis(500);

/// Longer than a connection from before may go on.
const LONG: Duration = Duration::from_secs(5);

/// How rules come to capture nothing.
#[derive(Clone, Copy, Debug)]
enum Gap {
    Drained,
    /// Every table is gone.
    Torn,
    /// The tables and their chains are there, without a rule.
    Emptied,
}

impl Gap {
    fn open(self, world: &World) {
        let backend = world.writer.configured.unwrap();
        match (self, backend) {
            (Self::Drained, _) => {
                world.remove(Phase::Drain);
            }
            (Self::Torn, Backend::Nftables | Backend::IptablesNft) => {
                world.pod.nft("flush ruleset");
            }
            (Self::Torn, Backend::IptablesLegacy) => {
                each_legacy(world, "-F OUTPUT", "-F PREROUTING");
            }
            (Self::Emptied, Backend::Nftables) => {
                for table in ["inpod-raw", "inpod-mangle", "inpod-nat"] {
                    world.pod.nft(&format!("flush table inet {table}"));
                }
            }
            (Self::Emptied, Backend::IptablesNft) => {
                for family in ["ip", "ip6"] {
                    for table in ["raw", "mangle", "nat"] {
                        for chain in ["INPOD_OUTPUT", "INPOD_PREROUTING"] {
                            world
                                .pod
                                .nft(&format!("flush chain {family} {table} {chain}"));
                        }
                    }
                }
            }
            (Self::Emptied, Backend::IptablesLegacy) => {
                each_legacy(world, "-F INPOD_OUTPUT", "-F INPOD_PREROUTING");
            }
        }
    }
}

/// In each table of both families.
fn each_legacy(world: &World, one: &str, other: &str) {
    let lines = ["raw", "mangle", "nat"].map(|table| format!("*{table}\n{one}\n{other}\nCOMMIT\n"));
    for program in ["iptables-legacy-restore", "ip6tables-legacy-restore"] {
        let script = format!("{program} --noflush -w 20 <<'END'\n{}END", lines.concat());
        world.pod.command("sh", &["-c", &script]);
    }
}

/// Talks on a connection that is there while something is done, until it is cut. When it was last answered, from when
/// that began.
pub(crate) fn last_answer(flow: &mut Flow, act: impl FnOnce()) -> Duration {
    thread::scope(|scope| {
        let began = Instant::now();
        let talking = scope.spawn(move || {
            let mut last = Duration::ZERO;
            while flow.talk().is_ok() {
                last = began.elapsed();
                // One that is not cut at all.
                if last > LONG {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            last
        });
        act();
        talking.join().unwrap()
    })
}

/// One by each way that ztunnel has: what it took, what it opened, to the outside and in a client's name.
fn carried(world: &World) -> Vec<(Dial, Flow)> {
    let dials = Family::ALL.map(|family| {
        let (pod, outside) = (pod(family), outside(family));
        let client = either(family, "192.0.2.7", "2001:db8::7");
        [
            Dial::tcp(Place::Outside, pod, 8080),
            Dial::tcp(Place::Outside, pod, 15008),
            Dial::tcp(Place::Pod, outside, 8080),
            Dial::tcp(Place::Pod, outside, 8080).marked(FROM_ZTUNNEL),
            Dial::tcp(Place::Pod, pod, 8080)
                .from(client)
                .marked(FROM_ZTUNNEL),
        ]
    });
    let hold = |dial: Dial| (dial.clone(), dial.hold(world).0.unwrap());
    dials.into_iter().flatten().map(hold).collect()
}

fn reopen(backend: Backend, gap: Gap, settings: &Ambient) -> Vec<String> {
    let world = World::new(backend, Pod::Dual);
    world.apply(settings);
    let mut carried = carried(&world);
    gap.open(&world);
    let dials = Family::ALL.map(|family| Dial::tcp(Place::Outside, pod(family), 8080));
    let mut past = dials.map(|dial| {
        let (flow, found) = dial.hold(&world);
        assert_eq!(found.by(), Some(By::Application), "{backend} {gap:?}");
        flow.unwrap()
    });
    let [first, second] = &mut past;
    let lasted = last_answer(first, || {
        world.apply(settings);
    });
    let mut told = Vec::new();
    if lasted < MOST_OF_A_SECOND {
        told.push(format!("cut after {lasted:?}"));
    }
    // Whoever speaks first.
    world.speak();
    for (dial, flow) in &mut carried {
        let cut = flow.hear().and_then(|()| flow.talk()).err();
        told.extend(cut.map(|why| format!("cut: {dial:?}: {why}")));
    }
    for (family, flow) in [(Family::V4, first), (Family::V6, second)] {
        if flow.talk().is_ok() {
            told.push(format!("{family} goes past ztunnel"));
        }
    }
    let when = format!("{backend} {gap:?}");
    told.iter().map(|told| format!("{when}: {told}")).collect()
}

#[test]
fn what_began_while_nothing_was_captured_has_a_second_to_end_and_what_ztunnel_carries_goes_on() {
    let gaps = [
        (Gap::Drained, scenario("tproxy")),
        (Gap::Torn, scenario("tproxy")),
        (Gap::Torn, scenario("plain")),
        (Gap::Emptied, scenario("dns")),
    ];
    let mut work = Vec::new();
    for backend in BACKENDS {
        work.extend(
            gaps.iter()
                .map(|(gap, settings)| (*backend, *gap, settings)),
        );
    }
    let failures = at_once(HANDS, &work, |(backend, gap, settings)| {
        reopen(*backend, *gap, settings)
    });
    assert_eq!(failures.concat(), [""; 0]);
}

/// So many of each kind are kept, of those that were not captured: the last ones.
const KEPT: usize = 16;

/// Of each kind so many are captured in a row when all are.
const IN_A_ROW: usize = 8;

/// Opens connections one after the other until all are captured, and keeps the last ones that were not.
fn open_until_captured(to: SocketAddr, ready: &AtomicUsize) -> VecDeque<BufReader<TcpStream>> {
    let (mut kept, mut in_a_row) = (VecDeque::new(), 0);
    while in_a_row < IN_A_ROW {
        let Ok((stream, by)) = open(to) else { continue };
        if matches!(by, Some(By::Ztunnel(_))) {
            in_a_row += 1;
            continue;
        }
        in_a_row = 0;
        kept.push_back(stream);
        if kept.len() > KEPT {
            kept.pop_front();
            ready.fetch_add(1, Ordering::Relaxed);
        }
    }
    kept
}

fn open(to: SocketAddr) -> io::Result<(BufReader<TcpStream>, Option<By>)> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let by = crate::stand_in::Answer::parse(&line).map(|answer| answer.by);
    Ok((stream, by))
}

fn goes_on(stream: &mut BufReader<TcpStream>) -> bool {
    let mut line = String::new();
    let heard = stream
        .get_mut()
        .write_all(b"hello\n")
        .and_then(|()| stream.read_line(&mut line));
    heard.is_ok() && line.ends_with("hello\n")
}

/// Connection tracking is there a moment before what captures, since one table is: what begins in between is known to
/// it, and would be left alone for good.
#[test]
fn of_connections_that_begin_while_a_pod_is_enrolled_none_goes_past_ztunnel_for_good() {
    let failures = at_once(BACKENDS.len(), BACKENDS, |backend| {
        let world = World::new(*backend, Pod::Dual);
        let ways = Family::ALL.map(|family| {
            let at = |address| SocketAddr::new(address, 8080);
            [
                (Place::Outside, at(pod(family))),
                (Place::Pod, at(outside(family))),
            ]
        });
        let ways = ways.into_iter().flatten();
        let kept = thread::scope(|scope| {
            let opening = ways.map(|(place, to)| {
                let netns = &world.at(place).netns;
                let ready = std::sync::Arc::new(AtomicUsize::new(0));
                let told = std::sync::Arc::clone(&ready);
                let open = move || netns.within(|| open_until_captured(to, &told)).unwrap();
                (scope.spawn(open), ready)
            });
            let opening: Vec<_> = opening.collect();
            while opening
                .iter()
                .any(|(_, ready)| ready.load(Ordering::Relaxed) == 0)
            {
                thread::yield_now();
            }
            world.apply(&Ambient::default());
            let kept = opening.into_iter().map(|(hand, _)| hand.join().unwrap());
            kept.flatten().collect::<Vec<_>>()
        });
        assert!(kept.len() >= 4 * KEPT, "{backend}: {}", kept.len());
        let past = thread::scope(|scope| {
            let each = |mut stream| scope.spawn(move || goes_on(&mut stream));
            let talking: Vec<_> = kept.into_iter().map(each).collect();
            let went = talking.into_iter().filter_map(|hand| hand.join().ok());
            went.filter(|goes_on| *goes_on).count()
        });
        (past > 0).then(|| format!("{backend}: {past} go past ztunnel"))
    });
    let failures: Vec<_> = failures.into_iter().flatten().collect();
    assert_eq!(failures, [""; 0]);
}

/// What connection tracking remembers of captured connections of a family: by the port that answers, or by the mark of
/// ztunnel's own in a client's name.
fn remembered(world: &World, family: Family) -> usize {
    let family = match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    };
    let listed = world
        .pod
        .command("conntrack", &["-L", "-f", family, "-p", "tcp"]);
    let captured = [" sport=15001 ", " sport=15006 ", " mark=273 "];
    let is_captured = |line: &&str| captured.iter().any(|part| line.contains(part));
    listed.lines().filter(is_captured).count()
}

/// A later connection of the same ends would be led as the captured one was, when the family is captured once more:
/// what the application answers a client would go to ztunnel, whom it never came from.
#[test]
fn nothing_is_remembered_of_what_was_captured_of_a_family_that_has_no_table_any_more() {
    let without_ipv6 = Ambient {
        ipv6: Ipv6::Off,
        ..Ambient::default()
    };
    for backend in [Backend::IptablesNft, Backend::IptablesLegacy] {
        let world = World::new(backend, Pod::Dual);
        world.apply(&Ambient::default());
        let held = Family::ALL.map(|family| {
            let client = outside(family);
            let dials = [
                Dial::tcp(Place::Outside, pod(family), 8080),
                Dial::tcp(Place::Pod, client, 8080),
                Dial::tcp(Place::Pod, pod(family), 8080)
                    .from(client)
                    .marked(FROM_ZTUNNEL),
            ];
            dials.map(|dial| dial.hold(&world).0.unwrap())
        });
        assert_eq!(Family::ALL.map(|family| remembered(&world, family)), [3, 3]);
        world.apply(&without_ipv6);
        assert_eq!(Family::ALL.map(|family| remembered(&world, family)), [3, 0]);
        let [mut of_ipv4, _] = held;
        assert!(
            of_ipv4.iter_mut().all(|flow| flow.talk().is_ok()),
            "{backend}"
        );
    }
}
