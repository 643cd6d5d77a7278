//! Certificate and configuration, followed without a restart: what cannot be used changes nothing and is told.
//!
//! They are read every few seconds and compared. The kubelet changes a mounted volume by a rename that no watch of a file
//! hears, and two files of some kilobytes are read in microseconds.

use std::{
    io,
    sync::{Arc, PoisonError, RwLock},
};

use inpod_injection::Injector;
use inpod_service::Readiness;

use crate::{
    certificate::{CurrentCertificate, Files},
    config::Config,
    metrics::Metrics,
};

/// What holds readiness up: there is a certificate to show and a configuration to go by, be they the newest or not.
/// Otherwise one change that cannot be used would take every replica out of the Service.
pub const SERVING: &str = "serving";

/// Whether what was read last could be used.
pub const CONDITIONS: [&str; 2] = ["certificate", "configuration"];

/// What is in force.
#[derive(Debug, Default)]
pub struct Current {
    /// What handshakes show.
    pub certificate: Arc<CurrentCertificate>,
    injector: RwLock<Option<Arc<Injector>>>,
}

impl Current {
    /// By what is injected; `None` until the configuration was read.
    pub fn injector(&self) -> Option<Arc<Injector>> {
        self.injector
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn serving(&self) -> Result<(), String> {
        if !self.certificate.is_loaded() {
            return Err("no certificate could be used yet".to_owned());
        }
        let injector = self.injector().map(drop);
        injector.ok_or_else(|| "no configuration could be used yet".to_owned())
    }

    fn replace(&self, injector: Injector) {
        let mut current = self
            .injector
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Some(Arc::new(injector));
    }
}

/// What was read last, whether or not it could be used.
#[derive(Debug, Default)]
struct LastRead {
    files: Option<Files>,
    text: Option<String>,
}

/// Follows both for ever.
pub(crate) async fn follow(
    config: Config,
    current: Arc<Current>,
    conditions: Readiness,
    metrics: Metrics,
) {
    let mut last = LastRead::default();
    loop {
        reload_certificate(&config, &current, &mut last, &conditions, &metrics);
        reload_configuration(&config, &current, &mut last, &conditions, &metrics);
        conditions.set(SERVING, current.serving());
        tokio::time::sleep(config.reload()).await;
    }
}

fn record_result(
    (what, conditions, metrics): (&'static str, &Readiness, &Metrics),
    result: Result<(), String>,
) {
    metrics.reloaded(what, if result.is_ok() { "used" } else { "refused" });
    match &result {
        Ok(()) => tracing::info!(what, "Read"),
        Err(why) => tracing::error!(what, why, "Cannot be used; what was in force stays"),
    }
    conditions.set(what, result);
}

fn reload_certificate(
    config: &Config,
    current: &Current,
    last: &mut LastRead,
    conditions: &Readiness,
    metrics: &Metrics,
) {
    let [what, _] = CONDITIONS;
    match Files::read(&config.tls_dir) {
        Ok(files) if last.files.as_ref() == Some(&files) => {}
        Ok(files) => {
            let result = current.certificate.replace(&files);
            let result = result.map(|ends| metrics.set_certificate_expiration(ends));
            record_result(
                (what, conditions, metrics),
                result.map_err(|error| error.to_string()),
            );
            last.files = Some(files);
        }
        // Between two contents of a volume; what is shown stays.
        Err(error) => conditions.set(what, Err(error.to_string())),
    }
}

fn reload_configuration(
    config: &Config,
    current: &Current,
    last: &mut LastRead,
    conditions: &Readiness,
    metrics: &Metrics,
) {
    let [_, what] = CONDITIONS;
    let text = match std::fs::read_to_string(&config.config_file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let why = format!("cannot read {}: {error}", config.config_file.display());
            return conditions.set(what, Err(why));
        }
    };
    if last.text.as_ref() == Some(&text) {
        return;
    }
    let injector = inpod_injection::Config::parse(&text).and_then(Injector::new);
    let result = injector.map(|injector| current.replace(injector));
    record_result(
        (what, conditions, metrics),
        result.map_err(|error| error.to_string()),
    );
    last.text = Some(text);
}
