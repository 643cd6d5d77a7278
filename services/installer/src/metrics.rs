//! What the installer counts.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

type ByResult = [(&'static str, &'static str); 1];

/// Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    installs: Family<ByResult, Counter>,
    rewrites: Family<ByResult, Counter>,
    fights: Counter,
}

impl Metrics {
    /// Declares them.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Copies of the plugin into the runtime's directory, by result";
        registry.register("installs", help, self.installs.clone());
        let help = "Changes of files of the CNI directory, by cause: first, followed (the primary or a setting changed), taken-away, leaving";
        registry.register("rewrites", help, self.rewrites.clone());
        let help = "Changes that were put off because somebody undoes them again and again";
        registry.register("fights", help, self.fights.clone());
    }

    /// The plugin was installed, or could not be.
    pub(crate) fn installed(&self, result: &'static str) {
        self.installs.get_or_create(&[("result", result)]).inc();
    }

    /// A file was changed.
    pub(crate) fn rewritten(&self, cause: &'static str) {
        self.rewrites.get_or_create(&[("cause", cause)]).inc();
    }

    /// A change was put off.
    pub(crate) fn contended(&self) {
        self.fights.inc();
    }
}
