use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command};

use super::path;
use crate::inject::InjectOptions;

fn is_patch(text: &str) -> Result<bool, String> {
    match text {
        "yaml" => Ok(false),
        "patch" => Ok(true),
        _ => Err("expected yaml or patch".to_owned()),
    }
}

pub(super) fn command() -> Command {
    Command::new("inject")
        .about("Print a manifest with the sidecars that the injector would add to its pods. Contacts no service and changes nothing")
        .args([
            path("file", "Manifest to read; - reads standard input")
                .short('f')
                .required(true),
            path(
                "config",
                "Configuration of the injector (inject.yaml of its ConfigMap); its defaults if omitted",
            ),
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(is_patch)
                .default_value("yaml")
                .help("yaml, or patch: one line of JSON with an RFC 6902 patch for each object"),
        ])
}

pub(super) fn options(matches: &ArgMatches) -> InjectOptions {
    let path = |name| matches.get_one::<PathBuf>(name).cloned();
    InjectOptions {
        file: path("file").unwrap_or_default(),
        config: path("config"),
        is_patch: matches.get_one("output").copied().unwrap_or(false),
    }
}
