//! The four acts of the demo. Each act prints a promise, keeps the promise, and prints the evidence.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{
    App, Call, Node, Pod, Spec, TIMEOUT, ask,
    clients::{Clients, Tally, tally},
    connect, counters, eventually, exchange, source_seen,
};
use nix::sys::signal::Signal;

use crate::{capture::Capture, print_fact, print_inpod, print_line, print_promise, print_quote};

const PORT: u16 = 8080;

/// The time between two requests of the client's loop.
const PERIOD: Duration = Duration::from_millis(10);

/// The number of requests in a phase.
const REQUESTS: u64 = 50;

/// A client pod and a server pod.
pub(crate) struct Pair {
    client: Pod,
    server: Pod,
    _app: App,
}

impl Pair {
    pub(crate) fn start(node: &Node) -> anyhow::Result<Self> {
        let client = node.pod(Spec::new("client"))?;
        let server = node.pod(Spec::new("server"))?;
        let app = App::start(&server.netns, PORT)?;
        Ok(Self {
            client,
            server,
            _app: app,
        })
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.server.v4.into(), PORT)
    }

    fn request(&self) -> Clients {
        Clients::start(&[&self.client], self.address(), PERIOD)
    }

    /// Captures packets at the server and searches them for the client's address, because the application answers with
    /// this address.
    fn capture(&self, node: &Node) -> anyhow::Result<Capture> {
        Capture::start(node.netns(), &self.server.veth, self.client.v4.to_string())
    }

    /// Enrolls both pods while the client sends requests.
    pub(crate) fn join(&self, node: &Node) -> anyhow::Result<()> {
        print_promise(
            "1. Running pods join the mesh: no request is lost, and they speak mutual TLS.",
        );
        let mut old = source_seen(connect(&self.client.netns, self.address())?)?.1;
        let capture = self.capture(node)?;
        let clients = self.request();
        clients.make(REQUESTS)?;
        let before = capture.stop()?;
        print_inpod(node, &["pods"], |_| true)?;
        print_line("   Both get the label istio.io/dataplane-mode=ambient.");
        let pods = [&self.client, &self.server];
        pods.iter()
            .try_for_each(|pod| node.write_manifest(&pod.spec.clone().ambient()))?;
        pods.iter()
            .try_for_each(|pod| node.until_whole(&pod.spec).map(drop))?;
        // One of two requests may have begun before the enrollment.
        clients.make(2)?;
        let capture = self.capture(node)?;
        clients.make(REQUESTS)?;
        let attempts = clients.stop()?;
        let after = capture.stop()?;
        print_inpod(node, &["pods"], |_| true)?;
        print_requests(&tally(&attempts, &[node.accesses()?]))?;
        let ended = exchange(&mut old, "hello").is_err();
        ensure!(ended, "an older connection goes past ztunnel");
        print_fact(
            "older connection",
            "reset after a second of grace: it would bypass ztunnel while it lives",
        );
        let redirected = counters(&self.client, "redirect to :15001")?;
        print_fact(
            "counter of nft",
            &format!(
                "{redirected} connections redirected to port 15001 since the final rules are in place"
            ),
        );
        for pod in [&self.client, &self.server] {
            let identity = identity_seen(node, pod)?;
            print_fact(
                &format!("{}'s peer", pod.spec.name),
                &format!("{identity}, proven by TLS"),
            );
        }
        print_fact(
            "on the wire",
            &format!(
                "readable: {} of {} packets before, {} of {} after ({} begin a TLS record)",
                before.readable, before.all, after.readable, after.all, after.tls
            ),
        );
        ensure!(before.readable > 0, "the capture has missed the plaintext");
        ensure!(after.readable == 0 && after.tls > 0, "plaintext is left");
        Ok(())
    }

    /// Flushes the rules of the client, and shows the repair.
    pub(crate) fn repair(&self, node: &Node) -> anyhow::Result<()> {
        print_promise("2. Rules that something removes are put back at once.");
        print_line("   $ nft flush ruleset     # in client's network namespace");
        self.client.exec(&["nft", "flush", "ruleset"])?;
        let flushed = Instant::now();
        while !self.client.ruleset()?.contains("redirect to :15001") {
            ensure!(flushed.elapsed() < TIMEOUT, "the rules stay away");
        }
        print_fact(
            "rules are back",
            &format!("after {:.0?}", flushed.elapsed()),
        );
        node.until_whole(&self.client.spec)?;
        print_inpod(node, &["explain", "shop/client"], |line| {
            line.starts_with("State") || line.contains("repaired rules")
        })?;
        let clients = self.request();
        clients.make(REQUESTS)?;
        let attempts = clients.stop()?;
        print_requests(&tally(&attempts, &[node.accesses()?]))
    }
}

fn print_requests(requests: &Tally) -> anyhow::Result<()> {
    let captured: usize = requests.taken_by.iter().sum();
    let text = format!(
        "{} sent, {} lost; {} direct, {captured} through ztunnel",
        requests.made, requests.failed, requests.around
    );
    print_fact("requests", &text);
    ensure!(requests.failed == 0, "requests were lost");
    ensure!(captured > 0, "requests go past ztunnel");
    Ok(())
}

/// Returns the identity that the pod's last peer proved.
fn identity_seen(node: &Node, pod: &Pod) -> anyhow::Result<String> {
    eventually("a tunnel has ended", TIMEOUT, || {
        let all = node.accesses()?.into_iter().rev();
        let mut peers = all.filter(|it| it.uid == pod.spec.uid).map(|it| it.peer);
        peers.find_map(|it| it).context("no identity")
    })
}

/// Starts a pod while no ztunnel runs.
pub(crate) fn wait(node: &Node) -> anyhow::Result<Pod> {
    print_promise("3. A pod of the mesh never starts outside of it: without a ztunnel, it waits.");
    node.stop("ztunnel", Signal::SIGKILL)?;
    let pod = node.sandbox(Spec::new("late").ambient())?;
    // By default, an ADD waits longer.
    let add = node.call(Call::add, &pod).timeout_seconds(2);
    let (_, refusal) = add.run()?.refusal()?;
    print_line(
        "   ztunnel is killed. The plugin tells the runtime why the pod late cannot start yet:",
    );
    print_quote(&refusal);
    node.start_hbone_ztunnel()?;
    let outcome = node.add(&pod)?;
    node.until_whole(&pod.spec)?;
    let took = format!(
        "the runtime tries again, and is answered after {:.0?}: late is in the mesh",
        outcome.took
    );
    print_fact("ztunnel starts", &took);
    Ok(pod)
}

/// Labels a pod whose application listens on a port that ztunnel needs.
pub(crate) fn refuse(node: &Node) -> anyhow::Result<Pod> {
    print_promise("4. A running pod that cannot join gets a reason, and works on as before.");
    let pod = node.pod(Spec::new("refused"))?;
    let app = App::start(&pod.netns, 15006)?;
    print_line(
        "   The application of the pod refused listens on ztunnel's port 15006. It gets the label.",
    );
    node.write_manifest(&pod.spec.clone().ambient())?;
    eventually("it is refused", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        ensure!(known.last_failure.is_some(), "{known:?}");
        anyhow::Ok(())
    })?;
    print_inpod(node, &["explain", "shop/refused"], |line| {
        let names = ["State", "Desired", "Failure", "Remedy"];
        names.iter().any(|name| line.starts_with(name))
    })?;
    ask(node.netns(), SocketAddr::new(pod.v4.into(), app.port()))?;
    print_fact("its application", "answers as before");
    Ok(pod)
}
