//! Commands that operators run on a node, with the settings of the service.

use std::{
    ffi::OsString,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use inpod_service::UninstallMode;

use crate::{
    SERVICE, config::Config, kill_switch, metrics::Metrics, reconcile::Installer, uninstall,
};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Disable,
    Enable,
    Leave(UninstallMode),
}

impl Command {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name {
            "disable" => Some(Self::Disable),
            "enable" => Some(Self::Enable),
            "uninstall" => Some(Self::Leave(UninstallMode::Uninstall)),
            "handover" => Some(Self::Leave(UninstallMode::Handover)),
            _ => None,
        }
    }
}

pub(crate) fn main(command: Command, arguments: &[OsString]) -> ExitCode {
    let message = inpod_service::load_settings::<Config>(&SERVICE, arguments)
        .and_then(|config| config.map(|config| run(command, config)).transpose());
    let written = match &message {
        Ok(Some(line)) => writeln!(io::stdout(), "{line}"),
        Ok(None) => Ok(()),
        Err(error) => writeln!(io::stderr(), "{}: {error:#}", SERVICE.name),
    };
    // A failed write to the terminal is ignored, because there is no other way to report the error.
    written.unwrap_or_default();
    message.map_or_else(
        |error| inpod_service::exit_code(&error),
        |_| ExitCode::SUCCESS,
    )
}

fn run(command: Command, config: Config) -> anyhow::Result<String> {
    inpod_service::deny_access_by_neighbors()?;
    let state_dir = config.on_host(&config.plugin_state_dir);
    let message = |was: bool, now: &str| {
        let already = if was { "" } else { " already" };
        format!("the plugin on this node is {now}{already}")
    };
    match command {
        Command::Disable => kill_switch::disable(&state_dir)
            .map(|was| message(was, "disabled: it passes every call through")),
        Command::Enable => kill_switch::enable(&state_dir).map(|was| message(was, "enabled")),
        Command::Leave(how) => return leave_node(config, how),
    }
    .with_context(|| format!("cannot change {}", state_dir.display()))
}

fn leave_node(config: Config, how: UninstallMode) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let installer = Installer::new(config, Metrics::default())?;
    let done = runtime
        .context("cannot start the runtime")?
        .block_on(uninstall::leave_node(installer, how))?;
    Ok(inpod_service::uninstall::receipt_line(how, &done))
}
