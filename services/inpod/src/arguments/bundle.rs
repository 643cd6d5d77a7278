use std::path::PathBuf;

use clap::Args;

use super::HostOptions;

#[derive(Args, Clone, Debug)]
pub(crate) struct BundleOptions {
    #[command(flatten)]
    pub(crate) host: HostOptions,
    /// Tar archive to create, or - for standard output.
    #[arg(short, long, value_name = "PATH", default_value = "inpod-bundle.tar")]
    pub(crate) output: PathBuf,
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::{Command, tests::parse};

    #[test]
    fn a_bundle_goes_where_its_output_option_points() {
        let Command::Bundle(options) = parse("inpod bundle -o /tmp/x").unwrap().command else {
            panic!("no bundle");
        };
        assert_eq!(options.output, PathBuf::from("/tmp/x"));
    }
}
