use crate::{Directory, NetworkFile};

use crate::config::{Config, KEYS};

pub(crate) fn config(settings: &[(&str, &str)]) -> Config {
    let mut arguments = vec!["installer".into()];
    for (name, value) in settings {
        assert!(KEYS.iter().any(|key| key.name == *name), "{name}");
        arguments.push(format!("--{}={value}", name.replace('_', "-")).into());
    }
    inpod_service::load_settings(&crate::SERVICE, &arguments)
        .unwrap()
        .unwrap()
}

pub(crate) fn directory(files: &[(&str, &str)]) -> Directory {
    let file = |(name, text): &(&str, &str)| {
        NetworkFile::new((*name).to_owned(), text.as_bytes().to_owned())
    };
    Directory::of(files.iter().map(file).collect())
}
