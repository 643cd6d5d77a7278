//! inpod beside what it replaces, interleaved in one run. Run it through `integration/bench/run`.

mod broker;
mod incumbent;
mod injector;
mod reconcile;
mod rules;
mod services;
mod stock;
mod table;
mod verbs;

use std::{
    fs,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use integration::guard;

const USAGE: &str = "\
bench [SAMPLES [WHAT [PODS [NAMESPACES]]]]

Measures inpod beside what it replaces. Run it through integration/bench/run,
which lists WHAT and its arguments.";

fn main() -> anyhow::Result<ExitCode> {
    let code = integration::answer(USAGE, |arguments| {
        arguments
            .first()
            .is_none_or(|first| !first.starts_with('-'))
    });
    match code {
        Some(code) => Ok(code),
        None => run().map(|()| ExitCode::SUCCESS),
    }
}

fn run() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().as_deref() == Some(broker::ZTUNNEL.as_ref()) {
        let socket = arguments.next().context("the socket is missing")?;
        return broker::ztunnel(socket.as_ref());
    }
    guard()?;
    let samples = std::env::args()
        .nth(1)
        .map_or(Ok(200), |text| text.parse())
        .context("SAMPLES is a number")?;
    let load = || fs::read_to_string("/proc/loadavg").unwrap_or_default();
    print_line(&format!("n = {samples}; load before: {}", load().trim()))?;
    let only = std::env::args().nth(2).unwrap_or_default();
    if only == "reconcile" {
        reconcile::reconcile(samples, size()?)?;
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    if only == "repair" {
        reconcile::repair(size()?.pods)?;
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    if only == "ztunnel" {
        stock::stock(samples)?;
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    if only == "injector" {
        injector::injector(samples)?;
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    if matches!(&*only, "" | "broker") {
        broker::broker(samples)?;
    }
    if only == "broker" {
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    rules::rules(samples)?;
    rules::again(samples.min(50))?;
    rules::workers(samples)?;
    rules::fuller(samples)?;
    if only == "rules" {
        return print_line(&format!("\nload after: {}", load().trim()));
    }
    verbs::verbs(samples)?;
    verbs::crowd(samples)?;
    services::starts(samples.min(50))?;
    services::memory()?;
    print_line(&format!("\nload after: {}", load().trim()))
}

/// Returns 250 pods and 10,000 namespaces by default.
fn size() -> anyhow::Result<reconcile::Size> {
    let number = |index, default| {
        let text = std::env::args().nth(index);
        text.map_or(Ok(default), |text| text.parse())
            .context("PODS and NAMESPACES are numbers")
    };
    Ok(reconcile::Size {
        pods: number(3, 250)?,
        namespaces: number(4, 10_000)?,
    })
}

fn print_line(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{text}").context("nobody listens")
}
