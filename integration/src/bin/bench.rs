//! Measures inpod beside what it replaces, interleaved in one run. Run it through `integration/bench/run`.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{Call, Node, SERVICES, Spec, bin, fresh_netns, guard, run};
use netconfig::{apply::apply, rules::Redirection};
use netns::Netns;
use nix::sys::signal::Signal;

fn main() -> anyhow::Result<()> {
    guard()?;
    let samples = std::env::args()
        .nth(1)
        .map_or(Ok(200), |text| text.parse())
        .context("SAMPLES is a number")?;
    let load = || fs::read_to_string("/proc/loadavg").unwrap_or_default();
    say(&format!("n = {samples}; load before: {}", load().trim()))?;
    rules(samples)?;
    verbs(samples)?;
    starts(samples.min(50))?;
    memory()?;
    say(&format!("\nload after: {}", load().trim()))
}

fn say(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{text}").context("nobody listens")
}

/// Times of one thing, in the order they were measured.
struct Row {
    what: &'static str,
    times: Vec<Duration>,
}

impl Row {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            times: Vec::new(),
        }
    }

    /// The time below which a share of the samples is, in microseconds.
    fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.times.clone();
        sorted.sort();
        let last = sorted.len().saturating_sub(1);
        #[expect(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a small count"
        )]
        let index = (share * last as f64).round() as usize;
        sorted
            .get(index)
            .map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }
}

fn table(title: &str, rows: &[Row]) -> anyhow::Result<()> {
    say(&format!(
        "\n### {title}\n\n| what | median us | p99 | min | n | x first |\n|---|---|---|---|---|---|"
    ))?;
    let first = rows.first().map_or(1.0, |row| row.quantile(0.5));
    for row in rows {
        let (median, p99, min) = (row.quantile(0.5), row.quantile(0.99), row.quantile(0.0));
        say(&format!(
            "| {} | {median:.0} | {p99:.0} | {min:.0} | {} | {:.2} |",
            row.what,
            row.times.len(),
            median / first
        ))?;
    }
    Ok(())
}

/// Runs something in a network namespace of its own, with `lo` up, and gives the time that it says it took.
fn in_fresh_netns(
    f: impl FnOnce(&Netns) -> anyhow::Result<Duration> + Send,
) -> anyhow::Result<Duration> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            fresh_netns()?;
            run("ip", &["link", "set", "lo", "up"])?;
            f(&Netns::current()?)
        });
        thread
            .join()
            .unwrap_or_else(|_| anyhow::bail!("a sample panicked"))
    })
}

fn timed(f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
    let started = Instant::now();
    f()?;
    Ok(started.elapsed())
}

/// Executes a program of the current netns with text on its standard input.
fn feed(program: &str, arguments: &[&str], text: &str) -> anyhow::Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    let stdin = child.stdin.take().context("no standard input")?;
    { stdin }.write_all(text.as_bytes())?;
    ensure!(child.wait()?.success(), "{program} failed");
    Ok(())
}

/// The same rules, as iptables knows them.
fn iptables_script(loopback: &str) -> String {
    format!(
        "*mangle\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A PREROUTING -j ISTIO_PRERT\n-A OUTPUT -j ISTIO_OUTPUT\n\
         -A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff\n\
         -A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xfff --ctmask 0xfff\nCOMMIT\n\
         *nat\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A PREROUTING -j ISTIO_PRERT\n\
         -A ISTIO_PRERT ! -d {loopback} -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006\n\
         -A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT\n-A ISTIO_OUTPUT ! -d {loopback} -o lo -j ACCEPT\n\
         -A ISTIO_OUTPUT ! -d {loopback} -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001\nCOMMIT\n"
    )
}

fn restore(variant: &str) -> anyhow::Result<()> {
    let (v4, v6) = (iptables_script("127.0.0.1/32"), iptables_script("::1/128"));
    feed(&format!("iptables-{variant}-restore"), &["--noflush"], &v4)?;
    feed(&format!("ip6tables-{variant}-restore"), &["--noflush"], &v6)
}

fn routes_by_ip() -> anyhow::Result<()> {
    let v4 = "rule add fwmark 0x111/0xfff pref 32764 lookup 100\nroute replace local 0.0.0.0/0 dev lo table 100\n";
    feed("ip", &["-batch", "-"], v4)?;
    feed(
        "ip",
        &["-6", "-batch", "-"],
        &v4.replace("0.0.0.0/0", "::/0"),
    )
}

fn rules(samples: usize) -> anyhow::Result<()> {
    let sandbox = workload::SandboxRef {
        network_name: "bench".parse()?,
        container_id: "bench".parse()?,
        ifname: "eth0".parse()?,
    };
    let script = Redirection::Ambient.ruleset().to_string();
    let mut rows = [
        Row::new("netconfig: rules, routes and ip rules, all read back"),
        Row::new("the same applied again: read back, nothing written"),
        Row::new("`nft -f -`, rules alone"),
        Row::new("`iptables-nft-restore` v4 + v6, rules alone"),
        Row::new("`iptables-legacy-restore` v4 + v6, rules alone"),
        Row::new("`ip -batch` v4 + v6, routes and ip rules alone"),
    ];
    let program = |netns: &Netns| {
        let started = Instant::now();
        let applied = apply(netns, Redirection::Ambient, &sandbox)?;
        ensure!(applied.changed, "nothing was written");
        Ok(started.elapsed())
    };
    let again = |netns: &Netns| {
        apply(netns, Redirection::Ambient, &sandbox)?;
        timed(|| {
            apply(netns, Redirection::Ambient, &sandbox)
                .map(drop)
                .map_err(Into::into)
        })
    };
    for _ in 0..samples {
        let times = [
            in_fresh_netns(program)?,
            in_fresh_netns(again)?,
            in_fresh_netns(|_| timed(|| feed("nft", &["-f", "-"], &script)))?,
            in_fresh_netns(|_| timed(|| restore("nft")))?,
            in_fresh_netns(|_| timed(|| restore("legacy")))?,
            in_fresh_netns(|_| timed(routes_by_ip))?,
        ];
        rows.iter_mut()
            .zip(times)
            .for_each(|(row, time)| row.times.push(time));
    }
    table("Rules in a fresh netns", &rows)
}

fn verbs(samples: usize) -> anyhow::Result<()> {
    let node = Node::running()?;
    let mut rows = [
        Row::new("VERSION: the plugin's cold start"),
        Row::new("`/bin/true`, for scale"),
        Row::new("ADD of a pod outside the mesh, exec to exit"),
        Row::new("ADD of an enrolled pod, exec to exit"),
        Row::new("DEL of an enrolled pod, exec to exit"),
    ];
    for _ in 0..samples {
        let (outside, inside) = (
            node.sandbox(Spec::new("outside"))?,
            node.sandbox(Spec::new("inside").ambient())?,
        );
        let version = Call {
            environment: vec![("CNI_COMMAND".to_owned(), "VERSION".to_owned())],
            stdin: r#"{"cniVersion":"1.0.0"}"#.to_owned(),
        };
        let add = |pod| -> anyhow::Result<Duration> {
            let outcome = node.call(Call::add, pod).run()?;
            ensure!(outcome.code == 0, "{outcome:?}");
            Ok(outcome.took)
        };
        let times = [
            version.run()?.took,
            timed(|| run::<&str>("/bin/true", &[]).map(drop))?,
            add(&outside)?,
            add(&inside)?,
            node.call(Call::del, &inside).run()?.took,
        ];
        rows.iter_mut()
            .zip(times)
            .for_each(|(row, time)| row.times.push(time));
        inside.unmount()?;
        node.del(&outside)?;
    }
    table("CNI verbs, with a reference ztunnel connected", &rows)
}

fn starts(samples: usize) -> anyhow::Result<()> {
    let node = Node::new()?;
    let mut rows = SERVICES.map(Row::new);
    for _ in 0..samples {
        for row in &mut rows {
            let socket = daemon::socket(&node.run_dir(), row.what);
            let started = Instant::now();
            node.start(row.what)?;
            while UnixStream::connect(&socket).is_err() {
                ensure!(
                    started.elapsed() < Duration::from_secs(10),
                    "{} does not come up",
                    row.what
                );
                thread::sleep(Duration::from_micros(200));
            }
            row.times.push(started.elapsed());
            node.stop(row.what, Signal::SIGTERM)?;
        }
    }
    table(
        "Cold start of a service: exec (through nsenter) to a socket that accepts",
        &rows,
    )
}

fn memory() -> anyhow::Result<()> {
    let node = Node::running()?;
    say(
        "\n### Resident memory, KiB\n\n| pods enrolled | netconfig | ztunnel-broker | pod-events | sum |\n|---|---|---|---|---|",
    )?;
    let mut pods = Vec::new();
    for enrolled in [0_usize, 10, 100] {
        while pods.len() < enrolled {
            pods.push(node.pod(Spec::new(&format!("pod-{}", pods.len())).ambient())?);
        }
        let sizes = SERVICES
            .iter()
            .map(|service| node.resident(service))
            .collect::<Result<Vec<_>, _>>()?;
        let [netconfig, broker, pod_events] = sizes[..] else {
            anyhow::bail!("three services")
        };
        let sum = netconfig + broker + pod_events;
        say(&format!(
            "| {enrolled} | {netconfig} | {broker} | {pod_events} | {sum} |"
        ))?;
    }
    let plugin = fs::metadata(bin("inpod-cni")?)?.len();
    say(&format!("\nThe plugin has {plugin} bytes."))
}
