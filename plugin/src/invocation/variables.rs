use std::{env, path::PathBuf, str::FromStr};

use inpod_types::SandboxRef;

use super::Verb;
use crate::{args::NamedPod, config::NetworkConfig, error::CniError};

/// The longest path that Linux accepts (PATH_MAX).
const MAX_PATH_BYTES: usize = 4096;

/// The `CNI_*` variables that the plugin reads (CNI spec, "Parameters"); an empty variable counts as absent. `CNI_PATH`
/// is for plugins that execute others, so the plugin does not read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables {
    pub command: Option<String>,
    pub container_id: Option<String>,
    pub netns: Option<String>,
    pub ifname: Option<String>,
    pub args: Option<String>,
}

impl Variables {
    pub fn from_environment() -> Self {
        Self {
            command: read_variable("CNI_COMMAND"),
            container_id: read_variable("CNI_CONTAINERID"),
            netns: read_variable("CNI_NETNS"),
            ifname: read_variable("CNI_IFNAME"),
            args: read_variable("CNI_ARGS"),
        }
    }

    /// Returns whether a runtime started this process: runtimes set `CNI_COMMAND`, if only to an empty value.
    pub fn has_command() -> bool {
        env::var_os("CNI_COMMAND").is_some()
    }

    pub fn verb(&self) -> Result<Verb, CniError> {
        match &self.command {
            Some(command) => command.parse(),
            None => Err(CniError::in_variable("CNI_COMMAND", "missing or empty")),
        }
    }

    pub(super) fn require(&self, names: &[&str]) -> Result<(), CniError> {
        let missing = [
            ("CNI_CONTAINERID", self.container_id.is_none()),
            ("CNI_NETNS", self.netns.is_none()),
            ("CNI_IFNAME", self.ifname.is_none()),
        ];
        let missing: Vec<&str> = missing
            .into_iter()
            .filter_map(|(name, is_missing)| (is_missing && names.contains(&name)).then_some(name))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(CniError::in_variable(
            &missing.join(", "),
            "missing or empty",
        ))
    }

    pub(super) fn sandbox(&self, config: &NetworkConfig) -> Result<SandboxRef, CniError> {
        Ok(SandboxRef {
            network_name: config.name.clone(),
            container_id: parse("CNI_CONTAINERID", self.container_id.as_deref())?,
            ifname: parse("CNI_IFNAME", self.ifname.as_deref())?,
        })
    }

    pub(super) fn netns(&self) -> Result<PathBuf, CniError> {
        let path = self.netns.as_deref().unwrap_or_default();
        if !path.starts_with('/') || path.len() > MAX_PATH_BYTES {
            let problem =
                format_args!("expected an absolute path of at most {MAX_PATH_BYTES} bytes");
            return Err(CniError::in_variable("CNI_NETNS", problem));
        }
        Ok(path.into())
    }

    pub(super) fn pod(&self, config: &NetworkConfig) -> Result<Option<NamedPod>, CniError> {
        let default = config.settings.default_namespace.as_ref();
        NamedPod::from_args(self.args.as_deref().unwrap_or_default(), default)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "CNI passes its parameters as variables; nothing else reads the environment"
)]
fn read_variable(name: &str) -> Option<String> {
    let value = match env::var(name) {
        Ok(value) => value,
        // An invalid value gets replacement characters, which fail the validation.
        Err(env::VarError::NotUnicode(value)) => value.to_string_lossy().into_owned(),
        Err(env::VarError::NotPresent) => return None,
    };
    (!value.is_empty()).then_some(value)
}

fn parse<T>(name: &str, text: Option<&str>) -> Result<T, CniError>
where
    T: FromStr<Err = inpod_types::InvalidIdentifier>,
{
    let parsed = text.unwrap_or_default().parse();
    parsed.map_err(|error| CniError::in_variable(name, error))
}
