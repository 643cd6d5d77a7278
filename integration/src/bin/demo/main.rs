//! Demonstrates inpod on the pods of a node. The program is run through `integration/demo`.

mod acts;
mod capture;

use std::{
    io::{self, Write as _},
    os::unix::fs::symlink,
    process::{Command, ExitCode},
};

use anyhow::Context as _;
use integration::{Node, SERVICES, run};

/// The width of a quoted line without its indentation, so that a line has at most 100 columns.
const WIDTH: usize = 95;

const USAGE: &str = "\
demo [--keep]

Shows on the terminal what inpod does for the pods of a node. Run it through
integration/demo, which isolates it. --keep leaves it running, with a shell.";

fn main() -> ExitCode {
    if let Some(code) = integration::answer(USAGE, |arguments| matches!(arguments, [] | ["--keep"]))
    {
        return code;
    }
    let keep = std::env::args().any(|argument| argument == "--keep");
    match show(keep) {
        Ok(()) => {
            print_promise("Verdict: everything went as promised.");
            ExitCode::SUCCESS
        }
        Err(error) => {
            print_promise("Verdict: FAILED.");
            print_line(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn show(keep: bool) -> anyhow::Result<()> {
    let node = start()?;
    let pair = acts::Pair::start(&node)?;
    pair.join(&node)?;
    pair.repair(&node)?;
    let _late = acts::wait(&node)?;
    let _refused = acts::refuse(&node)?;
    if keep {
        return play(&node);
    }
    Ok(())
}

/// Starts a node: a network namespace with a bridge, the three services, and a ztunnel.
fn start() -> anyhow::Result<Node> {
    let node = Node::new()?;
    SERVICES
        .iter()
        .try_for_each(|service| node.start(service))?;
    node.start_hbone_ztunnel()?;
    node.ready()?;
    print_line(
        "A node of namespaces runs inpod and its reference ztunnel; manifests stand in for an API server.",
    );
    Ok(node)
}

fn print_line(text: &str) {
    // A failed write is ignored, because the terminal may be closed.
    writeln!(io::stdout(), "{text}").unwrap_or_default();
}

fn print_promise(text: &str) {
    print_line(&format!("\n\x1b[1m{text}\x1b[0m"));
}

/// Prints a fact under its name.
fn print_fact(name: &str, text: &str) {
    print_line(&format!("   {name:17}{text}"));
}

/// Runs the client `inpod`, and prints the lines of its output that `is_shown` selects.
fn print_inpod(
    node: &Node,
    arguments: &[&str],
    is_shown: impl Fn(&str) -> bool,
) -> anyhow::Result<()> {
    let run_dir = node.run_dir().display().to_string();
    let all = [&["--run-dir", &run_dir], arguments].concat();
    let output = run(&integration::bin("inpod")?.display().to_string(), &all)?;
    print_line(&format!("   $ inpod {}", arguments.join(" ")));
    output
        .lines()
        .filter(|line| is_shown(line))
        .for_each(print_quote);
    Ok(())
}

/// Prints a line of another program, wrapped at `WIDTH`.
fn print_quote(line: &str) {
    let (mut wrapped, mut column) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        if column + word.len() > WIDTH {
            wrapped += "\n         ";
            column = 4;
        }
        wrapped += word;
        column += word.len();
    }
    print_line(&format!("     {}", wrapped.replace(" \n", "\n").trim_end()));
}

/// Opens a shell on the node, and returns when the user leaves the shell.
fn play(node: &Node) -> anyhow::Result<()> {
    print_promise("Everything is left running. In this shell, for example:");
    let inpod = integration::bin("inpod")?;
    let programs = inpod.parent().context("a program is in a directory")?;
    let manifests = node.manifests();
    for command in [
        "inpod pods --watch".to_owned(),
        "inpod explain shop/refused".to_owned(),
        format!(
            "sed -i s/ambient/none/ {}/shop-server.yaml   # withdraws server",
            manifests.display()
        ),
        format!("tail -f {}", node.access_log().display()),
    ] {
        print_line(&format!("   {command}"));
    }
    print_line("   exit   # ends everything");
    // The client expects the sockets here on a real node; `/run` belongs to this demo.
    symlink(node.run_dir(), "/run/inpod").context("cannot link /run/inpod")?;
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut shell = Command::new("nsenter");
    shell
        .arg(format!("--net={}", node.netns().path().display()))
        .args(["bash", "--norc", "-i"])
        .env("PS1", "inpod-demo# ")
        .env("PATH", path);
    shell.status().context("cannot start a shell").map(drop)
}
