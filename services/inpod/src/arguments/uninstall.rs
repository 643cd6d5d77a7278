//! Arguments of `uninstall` and `handover`.

use std::{path::PathBuf, time::Duration};

use clap::Args;

#[derive(Args, Clone, Debug)]
pub(crate) struct UninstallOptions {
    /// Namespace of inpod; the namespace of the kubeconfig's context if omitted.
    #[arg(short, long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Name of the agent's DaemonSet, and of the label app.kubernetes.io/name on its pods.
    #[arg(long, value_name = "NAME", default_value = "inpod")]
    pub(crate) daemonset: String,
    // Replaces the global option of the same name, which limits the answer of one service.
    #[arg(help = "How long to wait for the nodes, such as 90s or 5m", long, value_name = "TIME", value_parser = parse_duration, default_value = "5m")]
    pub(crate) timeout: Duration,
    /// Kubeconfig file; found like kubectl does, or the pod's service account, if omitted.
    #[arg(long, value_name = "PATH")]
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// Accepts `90`, `90s`, `5m` or `1h`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("", 1)];
    let unit = units.iter().find(|(unit, _)| text.ends_with(unit));
    let (unit, seconds) = unit.copied().unwrap_or(("", 1));
    let number: Option<u32> = text.strip_suffix(unit).and_then(|it| it.parse().ok());
    match number {
        Some(number) if number > 0 => Ok(Duration::from_secs(u64::from(number) * seconds)),
        Some(_) | None => Err("expected a duration such as 90s or 5m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Command, tests::parse},
        *,
    };

    #[test]
    fn uninstall_and_handover_share_their_options() {
        let handover = parse("inpod handover").unwrap().command;
        assert!(matches!(handover, Command::Handover(_)));
        let uninstall = parse("inpod uninstall -n mesh --timeout 90s").unwrap();
        let Command::Uninstall(options) = uninstall.command else {
            panic!("no uninstall");
        };
        assert_eq!(options.timeout, Duration::from_secs(90));
        assert_eq!(
            (options.namespace.as_deref(), options.daemonset.as_str()),
            (Some("mesh"), "inpod")
        );
        for line in [
            "inpod handover --timeout 0m",
            "inpod uninstall --mode uninstall",
        ] {
            assert!(parse(line).is_err_and(|error| error.use_stderr()), "{line}");
        }
    }
}
