//! Answers a person who runs the plugin by hand; a runtime sets `CNI_COMMAND` and passes no arguments.

use std::{
    env,
    io::{self, Write as _},
    process::ExitCode,
};

use inpod_cni::{invocation::Variables, version::SpecVersion};

const USAGE: &str = "\
Usage: inpod-cni [--help | --version]

A container runtime executes this CNI plugin with CNI_COMMAND in its
environment and the network configuration on stdin.

Options:
  -h, --help     Print this help
  -V, --version  Print the version and the CNI versions that are supported
";

/// Returns `None` for a call by a runtime, regardless of the arguments.
///
/// Without arguments, the version goes to stderr with exit code 0, as in containernetworking's plugins
/// (`skel.PluginMain`).
pub(crate) fn answer() -> Option<ExitCode> {
    if Variables::has_command() {
        return None;
    }
    let mut arguments = env::args_os().skip(1);
    let argument = arguments.next();
    let written = match (
        argument.as_ref().map(|argument| argument.to_str()),
        arguments.next(),
    ) {
        (None, _) => write!(io::stderr(), "{}", version()),
        (Some(Some("-h" | "--help")), None) => write!(io::stdout(), "{}\n{USAGE}", version()),
        (Some(Some("-V" | "--version")), None) => write!(io::stdout(), "{}", version()),
        (Some(_), _) => {
            // Exit code 2 reports the wrong usage even if stderr is closed.
            let _ignored = writeln!(io::stderr(), "Usage: inpod-cni [--help | --version]");
            return Some(ExitCode::from(2));
        }
    };
    Some(ExitCode::from(u8::from(written.is_err())))
}

fn version() -> String {
    format!(
        "inpod-cni {}\nCNI protocol versions supported: {}\n",
        inpod_types::VERSION,
        SpecVersion::ALL.map(SpecVersion::as_str).join(", ")
    )
}
