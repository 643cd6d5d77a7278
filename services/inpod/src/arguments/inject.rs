use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Args, Clone, Debug)]
pub(crate) struct InjectOptions {
    /// Manifest to read; - reads standard input.
    #[arg(short, long, value_name = "PATH")]
    pub(crate) file: PathBuf,
    /// Configuration of the injector (inject.yaml of its ConfigMap); its defaults if omitted.
    #[arg(long, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    /// yaml, or patch: one line of JSON with an RFC 6902 patch for each object.
    #[arg(
        short,
        long,
        value_name = "FORMAT",
        default_value = "yaml",
        hide_possible_values = true
    )]
    pub(crate) output: InjectOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum InjectOutput {
    Yaml,
    Patch,
}
