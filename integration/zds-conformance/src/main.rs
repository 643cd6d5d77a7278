//! Checks a ztunnel, or an agent, against the contract of ZDS.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its report is what it is for"
)]

use std::process::ExitCode;

use zds_conformance::{options::Options, process, report, run};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args_os()) {
        Ok(options) => options,
        Err(error) => {
            // clap prints help to standard output, and errors to standard error.
            drop(error.print());
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    if let Err(error) = process::end_with_us() {
        eprintln!("zds-conformance: {error}");
        return ExitCode::from(2);
    }
    match run::run(&options, |line| println!("{line}")) {
        Ok(records) if options.list => {
            drop(records);
            ExitCode::SUCCESS
        }
        Ok(records) => {
            println!("{}", report::summary(&records));
            ExitCode::from(report::Verdict::of(&records).code())
        }
        Err(error) => {
            eprintln!("zds-conformance: {error}");
            ExitCode::from(2)
        }
    }
}
