use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

type ByOrigin = [(&'static str, &'static str); 1];

#[derive(Clone, Debug, Default)]
pub(crate) struct DriftMetrics {
    events: Family<ByOrigin, Counter>,
    overruns: Counter,
    reads: Counter,
    published: Counter,
    uncaptured_udp_flows: Counter,
}

impl DriftMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let drift = Self::default();
        let help = "Kernel notifications of changes to nf_tables, routes and ip rules, by whether the netns is claimed";
        registry.register("drift_events", help, drift.events.clone());
        let help = "Times that the kernel dropped notifications, after which every claimed netns was read again";
        registry.register("drift_overruns", help, drift.overruns.clone());
        let help = "Reads of a claimed netns to check its state";
        registry.register("drift_reads", help, drift.reads.clone());
        let help = "Changes of a claimed netns that were reported to watchers";
        registry.register("drift_told", help, drift.published.clone());
        let help =
            "UDP flows that left claimed pods past capture, as far as reads of their rules found";
        let flows = drift.uncaptured_udp_flows.clone();
        registry.register("uncaptured_udp_flows", help, flows);
        drift
    }

    pub(crate) fn event(&self, is_claimed: bool) {
        let netns = if is_claimed { "claimed" } else { "other" };
        self.events.get_or_create(&[("netns", netns)]).inc();
    }

    /// Counts losses of notifications (ENOBUFS).
    pub(crate) fn overrun(&self) {
        self.overruns.inc();
    }

    pub(crate) fn read(&self) {
        self.reads.inc();
    }

    pub(crate) fn add_uncaptured_udp(&self, flows: u64) {
        self.uncaptured_udp_flows.inc_by(flows);
    }

    pub(crate) fn published(&self) {
        self.published.inc();
    }
}
