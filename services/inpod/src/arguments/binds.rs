use std::path::PathBuf;

use clap::Args;
use inpod_proto::types::v1::PodSelector;

use super::{Output, PodFilter, parse_pod};

const EXIT_CODES: &str = "\
Exit codes that differ from those of the other commands:
  0  enrollment changes nothing for the selected pods
  1  a pod could not be inspected, whatever changes for the others
  3  nothing changes, but the file of --services cannot be used
  4  enrollment changes who can reach a port, or a port that ztunnel needs is
     taken";

#[derive(Args, Clone, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BindsQuery {
    /// Only this pod.
    #[arg(value_name = "NAMESPACE/NAME", value_parser = parse_pod, conflicts_with = "namespace")]
    pod: Option<PodSelector>,
    #[command(flatten)]
    pub(crate) filter: PodFilter,
    /// Only pods with this label; may be repeated.
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<String>,
    /// File with EndpointSlices, to show the Services of each port: the output of kubectl get endpointslices -o json. -
    /// is standard input. kubectl inpod --services reads the slices for you.
    #[arg(long, value_name = "FILE")]
    pub(crate) services: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl BindsQuery {
    /// Returns the selected pods: an unset field matches every pod, and so does an unset selector.
    pub(crate) fn selector(&self) -> Option<PodSelector> {
        self.pod.clone().or_else(|| self.filter.selector())
    }
}

fn parse_label(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(text.to_owned()),
        Some(_) | None => Err("expected KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use inpod_proto::podevents::v1::PodState;

    use super::{
        super::{Command, Format, tests},
        *,
    };

    fn parse(line: &str) -> Result<BindsQuery, String> {
        let arguments = tests::parse(line).map_err(|error| error.to_string())?;
        let Command::Binds(query) = arguments.command else {
            panic!("{line}");
        };
        Ok(query)
    }

    #[test]
    fn pods_are_chosen_by_name_namespace_labels_and_state() {
        let all = parse("inpod binds").unwrap();
        assert_eq!((all.selector(), all.services), (None, None));
        let one = parse("inpod binds shop/web").unwrap().selector().unwrap();
        assert_eq!((one.namespace.as_str(), one.name.as_str()), ("shop", "web"));
        let some =
            parse("inpod binds -n shop -l app=web -l tier= --state out --services - -o json")
                .unwrap();
        assert_eq!(some.selector().unwrap().namespace, "shop");
        assert_eq!(some.labels, ["app=web", "tier="]);
        assert_eq!(
            (some.filter.states, some.output.format),
            (vec![PodState::Out], Format::Json)
        );
        assert_eq!(some.services, Some("-".into()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, named) in [
            ("inpod binds web", "NAMESPACE/NAME"),
            ("inpod binds shop/web -n shop", "--namespace"),
            ("inpod binds -l app", "KEY=VALUE"),
            ("inpod binds --services", "FILE"),
        ] {
            let text = parse(line).unwrap_err();
            assert!(text.contains(named), "{line}: {text}");
        }
    }
}
