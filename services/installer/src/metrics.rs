use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

type ByResult = [(&'static str, &'static str); 1];

#[derive(Clone, Debug, Default)]
pub struct Metrics {
    installs: Family<ByResult, Counter>,
    rewrites: Family<ByResult, Counter>,
    fights: Counter,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Installations of the plugin, by result";
        registry.register("installs", help, metrics.installs.clone());
        let help = "Changes of files in the CNI directory, by cause: first, followed (the primary or a setting changed), taken-away (another component removed inpod), leaving";
        registry.register("rewrites", help, metrics.rewrites.clone());
        let help = "Changes that were delayed because another component keeps reverting them";
        registry.register("fights", help, metrics.fights.clone());
        metrics
    }

    pub(crate) fn installed(&self, result: &'static str) {
        self.installs.get_or_create(&[("result", result)]).inc();
    }

    pub(crate) fn rewritten(&self, cause: &'static str) {
        self.rewrites.get_or_create(&[("cause", cause)]).inc();
    }

    pub(crate) fn contended(&self) {
        self.fights.inc();
    }
}
