use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

/// Numbers by value of the label, with the value "" if there is no label.
type Numbers = Vec<(&'static str, u64)>;

/// A gauge that reads its value during a scrape, and so is never out of date.
pub struct ObservableGauge {
    name: &'static str,
    help: &'static str,
    label: Option<&'static str>,
    read: Box<dyn Fn() -> Numbers + Send + Sync>,
}

impl ObservableGauge {
    pub fn new(
        name: &'static str,
        help: &'static str,
        read: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Box<Self> {
        Box::new(Self {
            name,
            help,
            label: None,
            read: Box::new(move || vec![("", read())]),
        })
    }

    /// Creates a gauge with a label; `read` returns each value of the label once.
    pub fn by_label<I: IntoIterator<Item = (&'static str, u64)>>(
        label: &'static str,
        name: &'static str,
        help: &'static str,
        read: impl Fn() -> I + Send + Sync + 'static,
    ) -> Box<Self> {
        Box::new(Self {
            name,
            help,
            label: Some(label),
            read: Box::new(move || read().into_iter().collect()),
        })
    }
}

impl fmt::Debug for ObservableGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservableGauge")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Collector for ObservableGauge {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // The library ends the help of its own metrics with a full stop.
        let help = format!("{}.", self.help);
        let mut metric = encoder.encode_descriptor(self.name, &help, None, MetricType::Gauge)?;
        for (value, number) in (self.read)() {
            let number = ConstGauge::new(number);
            match self.label {
                Some(label) => number.encode(metric.encode_family(&[(label, value)])?)?,
                None => return number.encode(metric),
            }
        }
        Ok(())
    }
}
