//! Arguments of `doctor`, and the paths that `bundle` shares with `doctor`.

use std::path::PathBuf;

use clap::Args;

use super::Format;
use crate::host_fs::HostFs;

#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorOptions {
    #[command(flatten)]
    pub(crate) host: HostOptions,
    /// Ask netconfig to write the rules of a pod in a temporary network namespace; netconfig logs the request.
    #[arg(long)]
    pub(crate) self_test: bool,
    #[arg(short, long, help = "Also list the checks that passed")]
    pub(crate) verbose: bool,
    /// table, or json or yaml: an object with the list of checks.
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        hide_possible_values = true
    )]
    pub(crate) format: Format,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HostOptions {
    /// Root directory of the node; /host in a debug pod.
    #[arg(long, value_name = "PATH", default_value = "/")]
    host_root: PathBuf,
    // The paths of host processes, below the root.
    /// Directory of the runtime's network configurations; read from the runtime's configuration if omitted.
    #[arg(long, value_name = "PATH")]
    pub(crate) cni_conf_dir: Option<String>,
    /// Directory of the runtime's CNI plugins; read from the runtime's configuration if omitted.
    #[arg(long, value_name = "PATH")]
    pub(crate) cni_bin_dir: Option<String>,
    /// State directory of the plugin (its stateDir).
    #[arg(long, value_name = "PATH", default_value = "/var/lib/inpod/plugin")]
    pub(crate) plugin_state_dir: String,
    /// Socket that ztunnel connects to.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/var/run/ztunnel/ztunnel.sock"
    )]
    pub(crate) zds_socket: String,
    /// Leave out checks of the node's files, which a container of inpod does not see.
    #[arg(long)]
    pub(crate) services_only: bool,
    /// `--run-dir` as host processes see it.
    #[arg(skip)]
    pub(crate) run_dir: String,
}

impl HostOptions {
    pub(crate) fn root(&self) -> HostFs {
        HostFs::new(&self.host_root)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, tests::parse},
        *,
    };

    #[test]
    fn a_node_is_examined_below_its_host_root() {
        let arguments = parse("inpod doctor --host-root /host --self-test -o json").unwrap();
        let Command::Doctor(options) = arguments.command else {
            panic!("no doctor");
        };
        assert_eq!(options.format, Format::Json);
        assert!(options.self_test);
        assert_eq!(arguments.run_dir, PathBuf::from("/host/run/inpod"));
        assert_eq!(options.host.run_dir, "/run/inpod");
        let here = parse("inpod doctor").unwrap();
        assert_eq!(here.run_dir, PathBuf::from("/run/inpod"));
    }
}
