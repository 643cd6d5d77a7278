//! `inpod-cni`, the CNI plugin: each process parses one call and forwards it to `pod-events`.

mod agent;
mod call;
mod fallback;
mod http2;
mod input;
mod log;
mod output;
mod usage;
mod verbs;

use std::process::ExitCode;

use inpod_cni::{invocation::Variables, version::SpecVersion};

fn main() -> ExitCode {
    if let Some(code) = usage::answer() {
        return code;
    }
    let variables = Variables::from_environment();
    let mut call = call::Call::start(variables.verb().ok());
    let mut stdin = Vec::new();
    let invocation = input::read_invocation(&variables, &call, &mut stdin);
    let outcome = match &invocation {
        Ok(invocation) => {
            call.apply_timeout(invocation);
            verbs::run(invocation, &call)
        }
        Err(error) => Err(error.clone()),
    };
    let printed = output::print(&outcome, SpecVersion::for_reply(&stdin));
    let report = log::Report {
        call: &call,
        verb: variables.command.as_deref(),
        invocation: invocation.as_ref().ok(),
        outcome: &outcome,
        printed: &printed,
    };
    report.write();
    ExitCode::from(u8::from(outcome.is_err() || printed.is_err()))
}
