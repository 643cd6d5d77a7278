//! The client for operators: lists and explains pods (`pods`, `explain`, `binds`, `resync`, `status`), diagnoses the
//! node (`doctor`, `bundle`), and removes inpod (`uninstall`, `handover`).
//!
//! The client uses the services' sockets and the node's files, without credentials of its own; `uninstall` and `handover`
//! call Kubernetes with the credentials of the user. The layout of tables may change between
//! releases; `-o json` prints the contract (`proto/`) in protobuf's JSON mapping.

mod arguments;
mod binds;
mod bundle;
mod display;
mod doctor;
mod error;
mod explain;
mod host_fs;
mod json;
mod kubernetes;
mod log_level;
mod node;
mod objects;
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

use inpod_service::UninstallMode;

use crate::{
    arguments::{Arguments, Command},
    error::CommandError,
    node::Node,
    out::Out,
};

/// Runs a command line, which starts with the program's name. The exit codes are documented in `--help`.
pub fn main(command_line: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::from_command_line(command_line) {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            print_error(&error.to_string());
            return ExitCode::from(2);
        }
        // The user asked for help or the version.
        Err(text) => return ended(Out::stdout().print_text(&text.to_string())),
    };
    ended(run(&arguments))
}

fn run(arguments: &Arguments) -> Result<(), CommandError> {
    inpod_service::deny_access_by_neighbors().map_err(CommandError::Runtime)?;
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
            Command::Explain(options) => explain::run(&node, options, &mut out).await,
            Command::Binds(query) => binds::run(&node, query, &mut out).await,
            Command::Resync(options) => resync::run(&node, options, &mut out).await,
            Command::LogLevel(options) => log_level::run(&node, options, &mut out).await,
            Command::Status => status::run(&node, &mut out).await,
            Command::Doctor(options) => {
                let node = node.with_timeout(arguments.timeout.min(doctor::QUERY_TIMEOUT));
                doctor::run(&node, options, &mut out).await
            }
            Command::Bundle(options) => bundle::run(&node, options, &mut out).await,
            Command::Uninstall(options) => {
                uninstall::run(UninstallMode::Uninstall, options, &mut out).await
            }
            Command::Handover(options) => {
                uninstall::run(UninstallMode::Handover, options, &mut out).await
            }
            Command::Completion { shell } => out.print_text(&arguments::completion_script(*shell)),
        }
    })
}

fn ended(result: Result<(), CommandError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the pipe has closed its end, as `head` does, and needs no more output.
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
    // A failure is ignored, because standard error is the last place to report to.
    io::stderr().write_all(text.as_bytes()).unwrap_or_default();
}
