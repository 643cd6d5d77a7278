use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};
use inpod_proto::{podevents::v1::PodState, types::v1::PodSelector};

use super::{Format, flag, format_of, named_pod, output, path, pods};

#[derive(Clone, Debug)]
pub(crate) struct BindsQuery {
    /// The selected pods: an unset field matches every pod, and so does an unset selector.
    pub(crate) pod: Option<PodSelector>,
    pub(crate) states: Vec<PodState>,
    pub(crate) labels: Vec<String>,
    pub(crate) unhealthy: bool,
    pub(crate) admitted_unenrolled: bool,
    pub(crate) services: bool,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) format: Format,
}

const EXIT_CODES: &str = "\
Exit codes that differ from those of the other commands:
  0  enrollment changes nothing for the selected pods
  1  a pod could not be inspected, whatever changes for the others
  3  nothing changes, but the ports of Services could not be read
  4  enrollment changes who can reach a port, or a port that ztunnel needs is
     taken";

fn label(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(text.to_owned()),
        Some(_) | None => Err("expected KEY=VALUE".to_owned()),
    }
}

pub(super) fn command() -> Command {
    Command::new("binds")
        .about("List what the applications of this node's pods listen on, and what enrollment changes about who can reach them")
        .arg(
            named_pod()
                .help("Only this pod")
                .conflicts_with("namespace"),
        )
        .args(pods::filters())
        .args([
            Arg::new("label")
                .short('l')
                .long("label")
                .value_name("KEY=VALUE")
                .value_parser(label)
                .action(ArgAction::Append)
                .help("Only pods with this label; may be repeated"),
            flag(
                "services",
                "Read from Kubernetes which Services target which ports. Uses your credentials; needs list of endpointslices and services, and of pods if a Service has no slice",
            ),
            path(
                "kubeconfig",
                "Kubeconfig file; found like kubectl does, or the pod's service account, if omitted",
            )
            .requires("services"),
            output(),
        ])
        .after_help(EXIT_CODES)
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
    BindsQuery {
        pod: matches.get_one("pod").cloned().or_else(of_namespace),
        states: pods::states(matches),
        labels: labels.cloned().collect(),
        unhealthy: matches.get_flag("unhealthy"),
        admitted_unenrolled: matches.get_flag("admitted-unenrolled"),
        services: matches.get_flag("services"),
        kubeconfig: matches.get_one("kubeconfig").cloned(),
        format: format_of(matches),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<BindsQuery, String> {
        let matches = command().try_get_matches_from(line.split(' '));
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
