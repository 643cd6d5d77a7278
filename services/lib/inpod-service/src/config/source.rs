//! Reads each source and checks its keys against the list of settings, so that misspelled names are reported.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::ArgMatches;
use config::{File, FileFormat, Map, Source as _, Value};

use super::{ConfigError, Key};
use crate::Service;

/// Returns the path in `--config`, or else the service's default path.
pub(super) fn file(service: &Service, given: Option<&String>) -> PathBuf {
    given.map_or_else(
        || {
            Path::new("/etc/inpod")
                .join(service.name)
                .with_extension("toml")
        },
        PathBuf::from,
    )
}

pub(super) fn defaults(keys: &[Key]) -> Map<String, Value> {
    let with_default = keys.iter().filter_map(|key| Some((key.name, key.default?)));
    with_default
        .map(|(name, text)| (name.to_owned(), text.into()))
        .collect()
}

/// Reads the settings file and checks its keys. Without `must_exist`, as for the default path, the file may be missing.
pub(super) fn from_file(
    keys: &[Key],
    file: &Path,
    must_exist: bool,
) -> Result<Map<String, Value>, ConfigError> {
    let source = File::new(&file.to_string_lossy(), FileFormat::Toml).required(must_exist);
    let values = source.collect().map_err(|error| {
        // The library shows a path relative to the working directory.
        let problem = format!("cannot use the configuration file {}", file.display());
        ConfigError::unusable(problem, error)
    })?;
    for name in values.keys() {
        known(keys, name, name, &file.display().to_string())?;
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

pub(super) fn from_flags(keys: &[Key], matches: &ArgMatches) -> Map<String, Value> {
    let given = keys
        .iter()
        .filter_map(|key| Some((key.name, matches.get_one::<String>(key.name)?)));
    given
        .map(|(name, text)| (name.to_owned(), text.as_str().into()))
        .collect()
}

fn known(keys: &[Key], name: &str, written: &str, origin: &str) -> Result<(), ConfigError> {
    if keys.iter().any(|key| key.name == name) {
        return Ok(());
    }
    let nearest = keys
        .iter()
        .map(|key| (distance(key.name, name), key.name))
        .min();
    let suggestion = match nearest {
        Some((..=3, name)) => format!("; did you mean {name}?"),
        Some(_) | None => String::new(),
    };
    Err(ConfigError::Keys(format!(
        "unknown setting {written} in {origin}{suggestion}"
    )))
}

/// Returns the Levenshtein distance of two names, to find misspelled settings.
fn distance(left: &str, right: &str) -> usize {
    let mut row: Vec<usize> = (0..=right.chars().count()).collect();
    for (i, l) in left.chars().enumerate() {
        let mut diagonal = i;
        let mut previous = i + 1;
        let mut next = vec![previous];
        for (r, above) in right.chars().zip(row.iter().skip(1)) {
            previous = (diagonal + usize::from(l != r))
                .min(previous + 1)
                .min(above + 1);
            diagonal = *above;
            next.push(previous);
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}
