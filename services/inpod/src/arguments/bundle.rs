use std::path::PathBuf;

use clap::{ArgAction, ArgMatches, Command};

use super::{doctor, flag, is_set, path};
use crate::doctor::DoctorOptions;

#[derive(Clone, Debug)]
pub(crate) struct BundleOptions {
    pub(crate) doctor: DoctorOptions,
    /// `-` for standard output, a file if its name ends in `.tar`, otherwise a directory.
    pub(crate) output: PathBuf,
    pub(crate) redact_addresses: bool,
    /// Log files to collect in addition to the logs of inpod's pods.
    pub(crate) logs: Vec<PathBuf>,
}

pub(super) fn command() -> Command {
    Command::new("bundle")
        .about("Collect the state of inpod on this node, without secrets, into one file to attach to a bug report")
        .args(doctor::host_paths())
        .args([
            path(
                "output",
                "File to create (must end in .tar), a directory that does not exist yet, or - for standard output",
            )
            .short('o')
            .default_value("inpod-bundle.tar"),
            path("log", "Another log file to include; may be repeated").action(ArgAction::Append),
            flag(
                "redact-addresses",
                "Replace each IP address by a placeholder, the same one everywhere",
            ),
        ])
}

pub(super) fn options(matches: &ArgMatches) -> BundleOptions {
    let logs = matches.get_many::<PathBuf>("log").into_iter().flatten();
    BundleOptions {
        doctor: doctor::options(matches),
        output: matches
            .get_one::<PathBuf>("output")
            .cloned()
            .unwrap_or_default(),
        redact_addresses: is_set(matches, "redact-addresses"),
        logs: logs.cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::{Command, tests::parse};

    #[test]
    fn a_bundle_goes_where_its_output_option_points() {
        let Command::Bundle(options) =
            parse("inpod bundle -o /tmp/x --log /a --log /b --redact-addresses")
                .unwrap()
                .command
        else {
            panic!("no bundle");
        };
        assert_eq!(options.output, PathBuf::from("/tmp/x"));
        assert!(options.redact_addresses && options.logs.len() == 2);
    }
}
