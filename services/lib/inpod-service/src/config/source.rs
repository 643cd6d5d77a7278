//! Reads each source and checks its keys against the list of settings, so that misspelled names are reported.

use std::ffi::OsString;

use clap::ArgMatches;
use config::{File, FileFormat, Map, Source as _, Value};

use super::{ConfigError, Key, REMOVED};

pub(super) fn defaults(keys: &[Key]) -> Map<String, Value> {
    let value = |key: &Key| Some((key.name.to_owned(), key.default?.into()));
    keys.iter().filter_map(value).collect()
}

/// Reads the settings file and checks its keys. Without `must_exist`, as for the default path, the file may be missing.
pub(super) fn from_file(
    keys: &[Key],
    file: &str,
    must_exist: bool,
) -> Result<Map<String, Value>, ConfigError> {
    let source = File::new(file, FileFormat::Toml).required(must_exist);
    let values = source.collect().map_err(|error| {
        // The library shows a path relative to the working directory.
        let problem = format!("cannot use the configuration file {file}");
        ConfigError::unusable(problem, error)
    })?;
    for name in values.keys() {
        known(keys, name, name, file)?;
    }
    Ok(values)
}

pub(super) fn from_environment(
    keys: &[Key],
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Map<String, Value>, ConfigError> {
    let mut values = Map::new();
    for (variable, value) in environment {
        let (variable, value) = (variable.to_string_lossy(), value.to_string_lossy());
        let Some(name) = variable.strip_prefix("INPOD_") else {
            continue;
        };
        if is_service_link(name) {
            continue;
        }
        let name = name.to_lowercase();
        known(keys, &name, &variable, "the environment")?;
        values.insert(name, (&*value).into());
    }
    Ok(values)
}

/// Matches the variables that the kubelet sets in every pod for a Service named `inpod` or `inpod-...`, such as
/// `INPOD_PORT_443_TCP_ADDR` (`enableServiceLinks`). Such variables are not settings.
fn is_service_link(name: &str) -> bool {
    let name = format!("_{name}");
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.contains("_PORT_")
}

pub(super) fn from_flags(
    keys: &[Key],
    matches: &ArgMatches,
) -> Result<Map<String, Value>, ConfigError> {
    let is_set = |(name, _): &&(&str, &str)| matches.contains_id(name);
    if let Some((name, _)) = REMOVED.iter().find(is_set) {
        let flag = format!("--{}", name.replace('_', "-"));
        known(keys, name, &flag, "the command line")?;
    }
    let value = |key: &Key| {
        let text = matches.get_one::<String>(key.name)?;
        Some((key.name.to_owned(), text.as_str().into()))
    };
    Ok(keys.iter().filter_map(value).collect())
}

fn known(keys: &[Key], name: &str, written: &str, origin: &str) -> Result<(), ConfigError> {
    if keys.iter().any(|key| key.name == name) {
        return Ok(());
    }
    if let Some((_, instead)) = REMOVED.iter().find(|(removed, _)| *removed == name) {
        return Err(ConfigError::Keys(format!(
            "setting {written} from {origin} was removed: {instead}"
        )));
    }
    let nearest = keys
        .iter()
        .map(|key| (strsim::levenshtein(key.name, name), key.name))
        .min();
    let suggestion = match nearest {
        Some((..=3, name)) => format!("; did you mean {name}?"),
        Some(_) | None => String::new(),
    };
    Err(ConfigError::Keys(format!(
        "unknown setting {written} in {origin}{suggestion}"
    )))
}
