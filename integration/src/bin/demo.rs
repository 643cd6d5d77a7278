//! Shows how a pod joins the mesh. Run it through `integration/demo`.

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    path::Path,
    process::{Command, ExitCode},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{Access, App, Call, Node, Pod, SERVICES, Spec, ask, eventually, run};

const PORT: u16 = 8080;

const USAGE: &str = "\
demo [--keep]

Shows on the terminal how a pod joins the mesh. Run it through integration/demo,
which isolates it. --keep leaves it running, with a shell to play in.";

fn main() -> ExitCode {
    if let Some(code) = integration::answer(USAGE, |arguments| matches!(arguments, [] | ["--keep"]))
    {
        return code;
    }
    let keep = std::env::args().any(|argument| argument == "--keep");
    match story(keep) {
        Ok(()) => {
            heading("Verdict: everything went as promised.");
            ExitCode::SUCCESS
        }
        Err(error) => {
            heading("Verdict: FAILED.");
            print_line(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn print_line(text: &str) {
    // The terminal may be closed.
    writeln!(io::stdout(), "{text}").unwrap_or_default();
}

fn heading(text: &str) {
    print_line(&format!("\n\x1b[1m{text}\x1b[0m"));
}

fn quote(text: &str) {
    text.trim_end()
        .lines()
        .for_each(|line| print_line(&format!("    {line}")));
}

fn story(keep: bool) -> anyhow::Result<()> {
    let node = set_up()?;
    heading(
        "2. Three pods: client and server carry the label istio.io/dataplane-mode=ambient, outsider does not",
    );
    let client = node.sandbox(Spec::new("client").ambient())?;
    let server = node.sandbox(Spec::new("server").ambient())?;
    let outsider = node.sandbox(Spec::new("outsider"))?;
    let apps = [
        App::start(&server.netns, PORT)?,
        App::start(&outsider.netns, PORT)?,
    ];
    for pod in [&client, &server, &outsider] {
        print_line(&format!(
            "    {:9} {} {}  netns {}",
            pod.spec.name,
            pod.v4,
            pod.v6,
            pod.path().display()
        ));
    }
    added(&node, &server)?;
    for pod in [&client, &outsider] {
        let outcome = node.add(pod)?;
        print_line(&format!(
            "    ADD of {}: exit {} after {:.1?}",
            pod.spec.name, outcome.code, outcome.took
        ));
    }
    explained(&node, &server)?;
    in_the_netns(&server)?;
    requests(&node, [&client, &server, &outsider])?;
    if keep {
        return play(&node, &server);
    }
    // Runtimes stop containers before the sandbox.
    drop(apps);
    deleted(&node, 8, server)?;
    deleted(&node, 9, client)?;
    node.del(&outsider)
}

fn set_up() -> anyhow::Result<Node> {
    heading("1. A node: a network namespace with a bridge, the three services, and a ztunnel");
    let node = Node::new()?;
    for service in SERVICES {
        node.start(service)?;
        print_line(&format!(
            "    {service:15} serves {}",
            inpod_service::socket(&node.run_dir(), service).display()
        ));
    }
    node.start_ztunnel(&[])?;
    print_line(
        "    reference-ztunnel connects to the broker's ZDS socket (a stock one would do the same)",
    );
    node.ready()?;
    print_line("    all are ready");
    Ok(node)
}

fn added(node: &Node, pod: &Pod) -> anyhow::Result<()> {
    heading("3. The runtime's ADD for server, exactly as containerd sends it");
    let call = node.call(Call::add, pod);
    for (name, value) in call
        .environment
        .iter()
        .filter(|(name, _)| name.starts_with("CNI_"))
    {
        print_line(&format!("    {name}={value}"));
    }
    quote(&format!("stdin: {}", call.stdin));
    let outcome = call.run()?;
    ensure!(outcome.code == 0, "ADD was refused: {}", outcome.stdout);
    print_line(&format!(
        "  exit {} after {:.1?}; stdout is the chain's result, byte for byte:",
        outcome.code, outcome.took
    ));
    quote(&outcome.stdout);
    Ok(())
}

fn explain_arguments(node: &Node, pod: &Pod) -> [String; 4] {
    [
        "--run-dir".into(),
        node.run_dir().display().to_string(),
        "explain".into(),
        format!("{}/{}", pod.spec.namespace, pod.spec.name),
    ]
}

fn explained(node: &Node, pod: &Pod) -> anyhow::Result<()> {
    heading("4. The decision and everything behind it: inpod explain");
    let arguments = explain_arguments(node, pod);
    print_line(&format!("    inpod {}", arguments.join(" ")));
    let program = integration::bin("inpod")?.display().to_string();
    let answer = run(&program, &arguments)?;
    quote(&answer);
    let mut state = answer.lines().filter_map(|line| line.strip_prefix("State"));
    let state = state.next().map(str::trim);
    ensure!(state == Some("enrolled"), "the pod is not enrolled");
    Ok(())
}

fn in_the_netns(pod: &Pod) -> anyhow::Result<()> {
    heading("5. Inside the netns of server: the rules (nft list ruleset)");
    quote(&pod.ruleset()?);
    print_line("  the rule and the route that bring answers back to ztunnel:");
    quote(
        &pod.traces()?
            .into_iter()
            .filter(|line| !line.starts_with("table"))
            .collect::<Vec<_>>()
            .join("\n"),
    );
    heading(
        "6. Inside the netns of server: ztunnel's listeners beside the application's (ss -ltn)",
    );
    quote(&pod.exec(&["ss", "-ltn"])?);
    Ok(())
}

fn requests(node: &Node, [client, server, outsider]: [&Pod; 3]) -> anyhow::Result<()> {
    heading("7. Requests: which listeners took each, and which source address the application saw");
    let expected = [
        (client, server, vec![("client", 15001), ("server", 15006)]),
        (outsider, server, vec![("server", 15006)]),
        (client, outsider, vec![("client", 15001)]),
        (server, server, vec![]),
    ];
    for (from, to, wanted) in expected {
        for (source, address) in from.addresses().into_iter().zip(to.addresses()) {
            let before = node.accesses()?.len();
            let seen = ask(&from.netns, SocketAddr::new(address, PORT))?;
            let taken = accepted(node, before, [client, server, outsider])?;
            let path: Vec<_> = taken
                .iter()
                .map(|(pod, port)| format!("{pod}:{port}"))
                .collect();
            let path = if path.is_empty() {
                "direct".to_owned()
            } else {
                path.join(" -> ")
            };
            print_line(&format!(
                "    {:8} -> {:8} {address:13}  {path:30} source seen: {seen}",
                from.spec.name, to.spec.name
            ));
            ensure!(taken == wanted, "expected {wanted:?}");
            ensure!(seen == source, "expected the source {source}");
        }
    }
    Ok(())
}

fn accepted<'a>(
    node: &Node,
    before: usize,
    pods: [&'a Pod; 3],
) -> anyhow::Result<Vec<(&'a str, u64)>> {
    let name = |access: &Access| {
        pods.iter()
            .find(|pod| pod.spec.uid == access.uid)
            .map(|pod| pod.spec.name.as_str())
    };
    let new = node
        .accesses()?
        .into_iter()
        .skip(before)
        .filter(|access| access.event == "accepted");
    new.map(|access| {
        Ok((
            name(&access).context("a listener of an unknown pod")?,
            access.listener,
        ))
    })
    .collect()
}

fn deleted(node: &Node, act: u32, pod: Pod) -> anyhow::Result<()> {
    heading(&format!(
        "{act}. The runtime's two DELs for {}, and no trace left",
        pod.spec.name
    ));
    node.del(&pod)?;
    let Pod {
        spec, veth, netns, ..
    } = pod;
    // This descriptor would keep the netns alive.
    drop(netns);
    eventually(
        "the host side of the veth is gone",
        Duration::from_secs(1),
        || {
            ensure!(
                !link_is_there(node.netns().path(), &veth),
                "{veth} is there"
            );
            anyhow::Ok(())
        },
    )?;
    let (claims, workloads) = (node.api().claims()?, node.api().workloads()?.workloads);
    ensure!(
        claims
            .iter()
            .all(|claim| claim.path != format!("/run/netns/{}", spec.name)),
        "the claim is held"
    );
    print_line(&format!(
        "    {veth} is gone; claims held: {}, workloads desired: {}",
        claims.len(),
        workloads.len()
    ));
    Ok(())
}

fn link_is_there(netns: &Path, link: &str) -> bool {
    run(
        "nsenter",
        &[
            &format!("--net={}", netns.display()),
            "ip",
            "link",
            "show",
            link,
        ],
    )
    .is_ok()
}

fn play(node: &Node, server: &Pod) -> anyhow::Result<()> {
    heading("8. Everything is left running. In this shell, for example:");
    let manifests = node.manifests();
    let inpod = integration::bin("inpod")?;
    let words = explain_arguments(node, server).join(" ");
    quote(&format!("{} {words}", inpod.display()));
    quote(&format!(
        "nsenter --net={} nft list ruleset",
        server.path().display()
    ));
    quote(&format!(
        "sed -i s/ambient/none/ {}/shop-server.yaml      # withdraws server",
        manifests.display()
    ));
    quote(&format!("tail -f {}", node.access_log().display()));
    print_line("  Leave the shell (exit) to end everything.");
    let mut shell = Command::new("bash");
    shell
        .args(["--norc", "-i"])
        .env("PS1", "inpod-demo# ")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    shell.status().context("cannot start a shell").map(drop)
}
