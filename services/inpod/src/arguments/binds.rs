//! The command line of `binds`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use inpod_proto::{podevents::v1::PodState, types::v1::PodSelector};

use super::{Format, flag, format_of, named_pod, output, state};

/// Whose binds are shown, and how.
#[derive(Clone, Debug)]
pub(crate) struct BindsQuery {
    /// Unset, as each of its fields: all.
    pub(crate) pod: Option<PodSelector>,
    pub(crate) states: Vec<PodState>,
    pub(crate) labels: Vec<String>,
    pub(crate) amiss: bool,
    pub(crate) let_through: bool,
    /// Whether Services are asked for.
    pub(crate) services: bool,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) format: Format,
}

fn label(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(text.to_owned()),
        Some(_) | None => Err("it is not KEY=VALUE".to_owned()),
    }
}

pub(super) fn binds() -> Command {
    Command::new("binds")
        .about("What the applications of this node's pods listen on, and what enrollment changes about who reaches them")
        .args([
            named_pod().help("Only this pod").conflicts_with("namespace"),
            Arg::new("namespace").short('n').long("namespace").value_name("NAMESPACE").help("Only of this namespace"),
            Arg::new("label")
                .short('l')
                .long("label")
                .value_name("KEY=VALUE")
                .value_parser(label)
                .action(ArgAction::Append)
                .help("Only those that have this label; may be repeated"),
            Arg::new("state")
                .long("state")
                .value_name("STATE")
                .value_parser(state)
                .action(ArgAction::Append)
                .help("Only those that stand there: out, enrolling, enrolled, withdrawing or deleting; may be repeated"),
            flag("amiss", "Only those that have a failure or were let through"),
            flag("let-through", "Only those that were let through without a decision"),
            flag("services", "Ask Kubernetes, with your rights, which Services lead to which ports (list of endpointslices and services, and of pods where a Service has no slice)"),
            Arg::new("kubeconfig")
                .long("kubeconfig")
                .value_name("PATH")
                .value_parser(value_parser!(PathBuf))
                .requires("services")
                .help("How the API server is reached; else as kubectl does, or as the pod's service account"),
            output(),
        ])
        .after_help("Exit codes, where they are others than those of all commands:\n  0  nothing changes for whom was asked\n  4  enrollment changes who reaches a port, or a port is in ztunnel's way\n  1  a pod could not be looked into, whatever changes for others\n  3  nothing changes, but what Services lead to could not be asked for")
}

pub(super) fn query(matches: &ArgMatches) -> BindsQuery {
    let of_namespace = || {
        let namespace = matches.get_one::<String>("namespace").cloned()?;
        Some(PodSelector {
            namespace,
            ..PodSelector::default()
        })
    };
    let labels = matches.get_many("label").into_iter().flatten();
    let states = matches.get_many("state").into_iter().flatten();
    BindsQuery {
        pod: matches.get_one("pod").cloned().or_else(of_namespace),
        states: states.copied().collect(),
        labels: labels.cloned().collect(),
        amiss: matches.get_flag("amiss"),
        let_through: matches.get_flag("let-through"),
        services: matches.get_flag("services"),
        kubeconfig: matches.get_one("kubeconfig").cloned(),
        format: format_of(matches),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<BindsQuery, String> {
        let matches = binds().try_get_matches_from(line.split(' '));
        let matches = matches.map_err(|error| error.to_string())?;
        Ok(query(&matches))
    }

    #[test]
    fn pods_are_chosen_by_name_namespace_labels_and_state() {
        let all = parse("binds").unwrap();
        assert_eq!((all.pod, all.services), (None, false));
        let one = parse("binds shop/web").unwrap().pod.unwrap();
        assert_eq!((one.namespace.as_str(), one.name.as_str()), ("shop", "web"));
        let some =
            parse("binds -n shop -l app=web -l tier= --state out --services -o json").unwrap();
        assert_eq!(some.pod.unwrap().namespace, "shop");
        assert_eq!(some.labels, ["app=web", "tier="]);
        assert_eq!(
            (some.states, some.format),
            (vec![PodState::Out], Format::Json)
        );
        assert!(some.services);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, named) in [
            ("binds web", "NAMESPACE/NAME"),
            ("binds shop/web -n shop", "--namespace"),
            ("binds -l app", "KEY=VALUE"),
            ("binds --kubeconfig /x", "--services"),
        ] {
            let text = parse(line).unwrap_err();
            assert!(text.contains(named), "{line}: {text}");
        }
    }
}
