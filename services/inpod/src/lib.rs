//! For people on a node: which of its pods are in the mesh, why or why not, and have them looked at anew; what is wrong
//! with the node (`doctor`), collected for somebody else (`bundle`); how a cluster is left (`leave`);
//! and what the injector makes of a manifest (`inject`).
//!
//! Everything is asked of the services' sockets and read from the node's files; this program holds no credential and
//! knows nothing by itself. `leave`, and `binds` where it is told to, ask Kubernetes, with the rights of whoever runs
//! them. What is printed for people may change from release to release; `-o json` is the contract (`proto/`), in
//! protobuf's JSON mapping.

mod arguments;
mod binds;
mod bundle;
mod display;
mod doctor;
mod error;
mod explain;
mod host_fs;
mod inject;
mod json;
mod kubernetes;
mod node;
mod out;
mod pods;
mod resync;
mod status;
mod table;
mod time;
mod uninstall;
mod watch;

use std::{
    ffi::OsString,
    io::{self, Write as _},
    process::ExitCode,
};

use crate::{
    arguments::{Arguments, Command, ParseError},
    error::CommandError,
    node::Node,
    out::Out,
};

/// Runs the program with its command line, the name first. The exit code is told by `--help`.
pub fn main(command_line: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::parse(command_line) {
        Ok(arguments) => arguments,
        Err(ParseError::Help(text)) => return ended(Out::stdout().text(&text)),
        Err(ParseError::Usage(text)) => {
            print_error(&text);
            return ExitCode::from(2);
        }
    };
    ended(run(&arguments))
}

fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CommandError::Runtime)?;
    let node = Node::new(&arguments.run_dir, arguments.timeout);
    let mut out = Out::stdout();
    runtime.block_on(async {
        match &arguments.command {
            Command::Pods(query) if query.watch => watch::run(&node, query, &mut out).await,
            Command::Pods(query) => pods::run(&node, query, &mut out).await,
            Command::Explain(pod, format) => explain::run(&node, pod, *format, &mut out).await,
            Command::Binds(query) => binds::run(&node, query, &mut out).await,
            Command::Resync(pod, format) => resync::run(&node, pod, *format, &mut out).await,
            Command::Status => status::run(&node, &mut out).await,
            Command::Doctor(options, format) => {
                let node = node.with_timeout(arguments.timeout.min(doctor::QUERY_TIMEOUT));
                doctor::run(&node, options, *format, &mut out).await
            }
            Command::Bundle(options) => bundle::run(&node, options, &mut out).await,
            Command::Uninstall(options) => uninstall::run(options, &mut out).await,
            Command::Inject(options) => inject::run(options, &mut out),
        }
    })
}

fn ended(result: Result<(), CommandError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has seen enough.
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            print_error(&format!("inpod: {error}\n"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn print_error(text: &str) {
    // Nobody is left to tell when this fails.
    io::stderr().write_all(text.as_bytes()).unwrap_or_default();
}
