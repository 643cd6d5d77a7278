//! Measures how costs grow with the node: memory, work at rest, restarts, running pods that join, and calls beside
//! load.

use std::{
    net::UdpSocket,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;

use crate::{
    calls,
    compare::{Comparison, milliseconds},
    floors, print_line,
    side::{Probe, Side},
};

/// The number of pods that get a label at the same time.
const JOINING: usize = 100;

/// The number of idle processes on a full node.
const PROCESSES: usize = 4000;

/// The number of tracked connections on a busy node; the kernel's default limit is 262,144.
const CONNECTIONS: usize = 100_000;

/// The time within which the work for a new pod ends.
pub(crate) const SETTLE: Duration = Duration::from_secs(3);

/// The time in which each probe of the chart runs at least once.
pub(crate) const REST: Duration = Duration::from_secs(20);

pub(crate) struct Growth {
    memory: Comparison,
    rest: Comparison,
    restarts: Comparison,
    samples: usize,
}

impl Growth {
    pub(crate) fn new(samples: usize, sides: &[Side]) -> Self {
        let table = |title, unit| {
            let names = sides.iter().map(|side| side.name.as_str());
            Comparison::new(title, unit, names)
        };
        Self {
            memory: table("Anonymous memory of the agent", "KiB"),
            rest: table(
                "Processor time of the agent at rest, with the probes of its chart",
                "ms per s",
            ),
            restarts: table(
                "Restart of the agent, until it has verified every pod",
                "ms",
            ),
            samples,
        }
    }

    /// Measures the agents while the number of pods increases.
    pub(crate) fn measure(mut self, sides: &mut Vec<Side>) -> anyhow::Result<()> {
        fill(sides, JOINING)?;
        self.restart(sides)?;
        fill(sides, 250)?;
        self.state(sides, "250 pods")?;
        self.restart(sides)?;
        self.state(sides, "250 pods, after these restarts")?;
        fill(sides, 500)?;
        self.state(sides, "500 pods")?;
        calls::one_at_a_time(self.samples, sides, None, "500 enrolled pods on each node")?;
        self.restart(sides)?;
        self.state(sides, "500 pods, after a restart")?;
        self.restarts.print()?;
        self.memory.print()?;
        self.rest.print()
    }

    pub(crate) fn state(&mut self, sides: &[Side], what: &str) -> anyhow::Result<()> {
        thread::sleep(SETTLE);
        let times = || {
            let times = sides.iter().map(Side::processor_time);
            times.collect::<anyhow::Result<Vec<_>>>()
        };
        let before = times()?;
        let probes = sides.iter().map(|side| side.probes(REST));
        let probes: Vec<_> = probes.flatten().collect();
        let began = Instant::now();
        execute(&probes, REST)?;
        let window = began.elapsed();
        for (side, (before, after)) in sides.iter().zip(before.into_iter().zip(times()?)) {
            let used = milliseconds(after.saturating_sub(before)) / window.as_secs_f64();
            self.rest.record_of(what, &side.name, used);
        }
        for side in sides {
            #[expect(
                clippy::as_conversions,
                clippy::cast_precision_loss,
                reason = "far fewer than 2^52"
            )]
            let anonymous = side.anonymous()? as f64;
            self.memory.record_of(what, &side.name, anonymous);
        }
        Ok(())
    }

    /// Restarts each agent. An agent that takes too long leaves the run. Istio's agent takes minutes beside a full
    /// node, so its restart is measured only once.
    fn restart(&mut self, sides: &mut Vec<Side>) -> anyhow::Result<()> {
        let rounds = calls::rounds(self.samples);
        let mut late = Vec::new();
        for round in 0..rounds {
            for side in sides.iter() {
                let once = side.is_istio() && side.pods() > JOINING;
                if once && round > 0 || late.contains(&side.name) {
                    continue;
                }
                thread::sleep(SETTLE);
                side.stop_agent()?;
                let before = side.processor_time()?;
                let took = side.resume()?.map_or(f64::INFINITY, milliseconds);
                let used = side.processor_time()?.saturating_sub(before);
                let what = format!("beside {} pods", side.pods());
                self.restarts.record_of(&what, &side.name, took);
                let what = format!("{what}: processor time");
                self.restarts
                    .record_of(&what, &side.name, milliseconds(used));
                if took.is_infinite() {
                    late.push(side.name.clone());
                }
            }
        }
        sides.retain(|side| !late.contains(&side.name));
        Ok(())
    }
}

/// Executes probes of the kubelet, spread over this time.
pub(crate) fn execute(probes: &[Probe<'_>], time: Duration) -> anyhow::Result<()> {
    let began = Instant::now();
    let share = time.checked_div(u32::try_from(probes.len())?);
    for (probe, number) in probes.iter().zip(1..) {
        probe.execute()?;
        let due = share.unwrap_or_default() * number;
        thread::sleep(due.saturating_sub(began.elapsed()));
    }
    thread::sleep(time.saturating_sub(began.elapsed()));
    Ok(())
}

/// Compares calls on one node as the node fills, and beside processes and connections on the node.
pub(crate) fn calls(samples: usize, side: &mut Side) -> anyhow::Result<()> {
    const FEW: &str = "10 pods";
    let columns = [
        FEW,
        "and 4,000 processes",
        "and 100,000 connections",
        "250 pods",
        "1,000 pods",
        "4,000 pods",
    ];
    let table = |title, unit| Comparison::new(title, unit, columns);
    let mut times = table("Calls as the node fills: from exec to exit", "ms");
    let mut usage = table("Calls as the node fills: processor time", "ms");
    let mut counts = table("Calls as the node fills: counts of netconfig", "count");
    let nothing = integration::bin("nothing")?.display().to_string();
    let mut filled = Vec::new();
    for (column, name) in columns.into_iter().enumerate() {
        let (mut processes, mut tracked) = (None, None);
        match name {
            "and 4,000 processes" => processes = Some(Processes::start(PROCESSES)?),
            "and 100,000 connections" => tracked = Some(connections(CONNECTIONS)?),
            _ => {
                let pods = name.trim_end_matches(" pods").replace(',', "").parse()?;
                let began = Instant::now();
                side.fill(pods)?;
                let took = began.elapsed();
                filled.push(format!("{name} {} s", took.as_secs()));
                thread::sleep(SETTLE);
            }
        }
        for _ in 0..samples {
            // The kernel still destroys the netns of the previous calls, which takes longer on a full node.
            thread::sleep(SETTLE / 6);
            let began = Instant::now();
            integration::run::<&str>(&nothing, &[])?;
            let took = milliseconds(began.elapsed());
            times.record(floors::STATIC, column, took);
            calls::round(side, column, &mut times, &mut usage, Some(&mut counts))?;
        }
        drop((processes, tracked));
    }
    times.print_growth()?;
    usage.print_growth()?;
    counts.print_growth()?;
    print_line(&format!(
        "\nFilling took, with four plugins at once: {}.",
        filled.join(", ")
    ))
}

pub(crate) fn fill(sides: &mut [Side], count: usize) -> anyhow::Result<()> {
    sides.iter_mut().try_for_each(|side| side.fill(count))
}

/// Compares calls beside many idle processes, and beside many tracked connections.
pub(crate) fn beside(samples: usize, sides: &[Side]) -> anyhow::Result<()> {
    let processes = Processes::start(PROCESSES)?;
    calls::one_at_a_time(samples, sides, None, "4,000 more processes")?;
    drop(processes);
    let connections = connections(CONNECTIONS)?;
    calls::one_at_a_time(samples, sides, None, "100,000 tracked connections")?;
    drop(connections);
    Ok(())
}

/// Compares how long the running pods of a namespace wait for their rules.
pub(crate) fn joining(samples: usize, sides: &[Side]) -> anyhow::Result<()> {
    let names = sides.iter().map(|side| side.name.as_str());
    let mut table = Comparison::new(
        &format!("{JOINING} running pods join by a label of their namespace"),
        "ms",
        names,
    );
    for _ in 0..calls::rounds(samples) {
        for (index, side) in sides.iter().enumerate() {
            let pods = side.running_outside(JOINING)?;
            thread::sleep(SETTLE);
            let before = side.processor_time()?;
            let began = Instant::now();
            side.label(Some("ambient"))?;
            for pod in &pods {
                pod.until_rules_exist(true)?;
            }
            let took = milliseconds(began.elapsed());
            table.record("until all have rules", index, took);
            thread::sleep(SETTLE);
            let used = side.processor_time()?.saturating_sub(before);
            table.record("processor time of the agent", index, milliseconds(used));
            let before = side.processor_time()?;
            side.label(None)?;
            // Istio's agent leaves empty tables.
            if !side.is_istio() {
                for pod in &pods {
                    pod.until_rules_exist(false)?;
                }
                thread::sleep(SETTLE);
                let used = side.processor_time()?.saturating_sub(before);
                table.record("their leaving: processor time", index, milliseconds(used));
            }
            side.end(&pods.iter().map(|pod| &pod.pod).collect::<Vec<_>>())?;
            drop(pods);
        }
    }
    table.print()
}

struct Processes(Vec<Child>);

impl Processes {
    fn start(count: usize) -> anyhow::Result<Self> {
        let mut processes = Self(Vec::new());
        for _ in 0..count {
            let child = Command::new("sleep").arg("infinity").spawn();
            processes.0.push(child.context("cannot start a process")?);
        }
        Ok(processes)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().unwrap_or_default();
        }
        for child in &mut self.0 {
            child.wait().map(drop).unwrap_or_default();
        }
    }
}

/// Creates a netns with `count` tracked connections, which end with the netns.
fn connections(count: usize) -> anyhow::Result<Netns> {
    let netns = Netns::create()?;
    let path = "/proc/sys/net/netfilter/nf_conntrack";
    netns.within(|| {
        integration::run("ip", &["link", "set", "lo", "up"])?;
        let rules = ["add table ip t; add chain ip t c { type filter hook output priority 0; ct state new accept; }"];
        integration::run("nft", &rules)?;
        std::fs::write(format!("{path}_udp_timeout"), "3600")?;
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        for number in 0..count {
            // No process listens at the destination, so a send fails with the error for an earlier one.
            let host = u8::try_from(number / 50_000)? + 1;
            let port = u16::try_from(number % 50_000)? + 1024;
            let sent = socket.send_to(b"", (std::net::Ipv4Addr::new(127, 1, 0, host), port));
            sent.map(drop).unwrap_or_default();
        }
        let tracked: usize = std::fs::read_to_string(format!("{path}_count"))?.trim().parse()?;
        ensure!(tracked * 10 >= count * 9, "{tracked} connections are tracked");
        anyhow::Ok(())
    })??;
    Ok(netns)
}
