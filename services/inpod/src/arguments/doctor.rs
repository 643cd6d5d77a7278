//! Arguments of `doctor`, and the paths that `bundle` shares with `doctor`.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, parser::ValueSource};

use super::{flag, is_set, output, path, string, text};
use crate::{
    doctor::{DoctorOptions, HostPaths},
    host_fs::HostFs,
};

/// Returns the option for the host's root, followed by options for paths below the root as host processes see them.
pub(super) fn host_paths() -> [Arg; 6] {
    [
        path(
            "host-root",
            "Root directory of the node; /host in a debug pod",
        )
        .default_value("/"),
        text(
            "cni-conf-dir",
            "Directory of the runtime's network configurations; read from the runtime's configuration if omitted",
        )
        .value_name("PATH"),
        text(
            "cni-bin-dir",
            "Directory of the runtime's CNI plugins; read from the runtime's configuration if omitted",
        )
        .value_name("PATH"),
        text("plugin-state-dir", "State directory of the plugin (its stateDir)")
            .value_name("PATH")
            .default_value("/var/lib/inpod/plugin"),
        text("zds-socket", "Socket that ztunnel connects to")
            .value_name("PATH")
            .default_value("/var/run/ztunnel/ztunnel.sock"),
        flag(
            "services-only",
            "Leave out checks of the node's files, which a container of inpod does not see",
        ),
    ]
}

pub(super) fn command() -> Command {
    Command::new("doctor")
        .about("Diagnose this node: list every problem with its code and how to fix it")
        .args(host_paths())
        .arg(flag(
            "self-test",
            "Ask netconfig to send traffic through real rules in two temporary network namespaces; netconfig logs the request",
        ))
        .arg(flag("verbose", "Also list the checks that passed").short('v'))
        .arg(output().help("table, or json or yaml: an object with the list of checks"))
}

fn host_root(matches: &ArgMatches) -> PathBuf {
    let root = matches.get_one::<PathBuf>("host-root").cloned();
    root.unwrap_or_else(|| "/".into())
}

pub(super) fn options(matches: &ArgMatches) -> DoctorOptions {
    let run_dir = matches
        .get_one::<PathBuf>("run-dir")
        .cloned()
        .unwrap_or_default();
    DoctorOptions {
        root: HostFs::new(&host_root(matches)),
        paths: HostPaths {
            cni_conf_dir: string(matches, "cni-conf-dir"),
            cni_bin_dir: string(matches, "cni-bin-dir"),
            plugin_state_dir: string(matches, "plugin-state-dir").unwrap_or_default(),
            zds_socket: string(matches, "zds-socket").unwrap_or_default(),
            run_dir: run_dir.display().to_string(),
        },
        self_test: is_set(matches, "self-test"),
        services_only: is_set(matches, "services-only"),
        verbose: is_set(matches, "verbose"),
    }
}

/// Returns the sockets' directory as this process sees the directory: below the root if `--host-root` is given.
pub(super) fn run_dir(matches: &ArgMatches, run_dir: PathBuf) -> PathBuf {
    let Some(("doctor" | "bundle", rest)) = matches.subcommand() else {
        return run_dir;
    };
    if rest.value_source("host-root") == Some(ValueSource::CommandLine) {
        return HostFs::new(&host_root(rest)).at(Path::new(&run_dir));
    }
    run_dir
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, Format, tests::parse},
        *,
    };

    #[test]
    fn a_node_is_examined_below_its_host_root() {
        let arguments = parse("inpod doctor --host-root /host --self-test -o json").unwrap();
        let Command::Doctor(options, Format::Json) = arguments.command else {
            panic!("no doctor");
        };
        assert!(options.self_test);
        assert_eq!(arguments.run_dir, PathBuf::from("/host/run/inpod"));
        assert_eq!(options.paths.run_dir, "/run/inpod");
        let here = parse("inpod doctor").unwrap();
        assert_eq!(here.run_dir, PathBuf::from("/run/inpod"));
    }
}
