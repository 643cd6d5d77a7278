//! Reloads the certificate and the configuration without a restart. An invalid file is reported, and the previous one
//! stays in use.
//!
//! The files are polled, because the kubelet updates a volume by a rename that a watch misses, and reading a few
//! kilobytes takes microseconds.

use std::{
    io,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use inpod_injection::Injector;
use inpod_service::{Readiness, read_bounded_text};

use crate::{
    certificate::{CurrentCertificate, Files, MAX_FILE_BYTES},
    config::Config,
    metrics::Metrics,
};

const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The condition that readiness requires. The condition requires usable files, not the newest files: otherwise one
/// invalid update would remove every replica from the Service.
pub const SERVING: &str = "serving";

/// The conditions that report whether the newest files are usable.
pub const CONDITIONS: [&str; 2] = ["certificate", "configuration"];

#[derive(Debug, Default)]
pub struct Current {
    pub certificate: Arc<CurrentCertificate>,
    injector: RwLock<Option<Arc<Injector>>>,
}

impl Current {
    /// Returns the injector, or `None` until a configuration has been read.
    pub fn injector(&self) -> Option<Arc<Injector>> {
        self.injector
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn serving(&self) -> Result<(), String> {
        if !self.certificate.is_loaded() {
            return Err("no usable certificate yet".to_owned());
        }
        let injector = self.injector().map(drop);
        injector.ok_or_else(|| "no usable configuration yet".to_owned())
    }

    fn replace(&self, injector: Injector) {
        let mut current = self
            .injector
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Some(Arc::new(injector));
    }
}

/// The files as they were last read, usable or not.
#[derive(Debug, Default)]
struct LastRead {
    files: Option<Files>,
    text: Option<String>,
}

pub(crate) async fn poll(
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
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn record_result(
    (file, conditions, metrics): (&'static str, &Readiness, &Metrics),
    result: Result<(), String>,
) {
    metrics.reloaded(file, if result.is_ok() { "used" } else { "refused" });
    match &result {
        Ok(()) => tracing::info!(what = file, "Loaded"),
        Err(why) => tracing::error!(
            what = file,
            why,
            "Cannot use the new certificate or configuration; the previous one stays in use"
        ),
    }
    conditions.set(file, result);
}

fn reload_certificate(
    config: &Config,
    current: &Current,
    last: &mut LastRead,
    conditions: &Readiness,
    metrics: &Metrics,
) {
    let [file, _] = CONDITIONS;
    match Files::read(&config.tls_dir) {
        Ok(files) if last.files.as_ref() == Some(&files) => {}
        Ok(files) => {
            let result = current.certificate.replace(&files);
            let result = result.map(|ends| metrics.set_certificate_expiration(ends));
            record_result(
                (file, conditions, metrics),
                result.map_err(|error| error.to_string()),
            );
            last.files = Some(files);
        }
        // The files may be missing because the kubelet is replacing the volume at this moment.
        Err(error) => conditions.set(file, Err(error.to_string())),
    }
}

fn reload_configuration(
    config: &Config,
    current: &Current,
    last: &mut LastRead,
    conditions: &Readiness,
    metrics: &Metrics,
) {
    let [_, file] = CONDITIONS;
    let text = match read_bounded_text(&config.config_file, MAX_FILE_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let why = format!("cannot read {}: {error}", config.config_file.display());
            return conditions.set(file, Err(why));
        }
    };
    if last.text.as_ref() == Some(&text) {
        return;
    }
    let injector = inpod_injection::Config::parse(&text).and_then(Injector::new);
    let result = injector.map(|injector| current.replace(injector));
    record_result(
        (file, conditions, metrics),
        result.map_err(|error| error.to_string()),
    );
    last.text = Some(text);
}
