use std::path::PathBuf;

use clap::{ArgMatches, Command};

use super::{doctor, flag, is_set, path};
use crate::doctor::DoctorOptions;

#[derive(Clone, Debug)]
pub(crate) struct BundleOptions {
    pub(crate) doctor: DoctorOptions,
    /// The archive to create, or `-` for standard output.
    pub(crate) output: PathBuf,
    pub(crate) has_logs: bool,
}

pub(super) fn command() -> Command {
    Command::new("bundle")
        .about("Pack what inpod's services answer on this node, with their metrics, into one file to attach to a bug report")
        .args(doctor::host_paths())
        .args([
            path("output", "Tar archive to create, or - for standard output")
                .short('o')
                .default_value("inpod-bundle.tar"),
            flag("logs", "Also pack the logs of inpod's pods, unredacted"),
        ])
}

pub(super) fn options(matches: &ArgMatches) -> BundleOptions {
    let output = matches.get_one::<PathBuf>("output").cloned();
    BundleOptions {
        doctor: doctor::options(matches),
        output: output.unwrap_or_default(),
        has_logs: is_set(matches, "logs"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::{Command, tests::parse};

    #[test]
    fn a_bundle_goes_where_its_output_option_points() {
        let Command::Bundle(options) = parse("inpod bundle -o /tmp/x --logs").unwrap().command
        else {
            panic!("no bundle");
        };
        assert_eq!(options.output, PathBuf::from("/tmp/x"));
        assert!(options.has_logs);
    }
}
