use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
    registry::Unit,
};

/// The kernel's figures about this process, under the names that all Prometheus clients use.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // An unreadable value is omitted, because zero would be wrong.
        if let Some(open) = open_fds() {
            let help = "Open file descriptors.";
            let metric =
                encoder.encode_descriptor("process_open_fds", help, None, MetricType::Gauge)?;
            ConstGauge::new(open).encode(metric)?;
        }
        if let Some(bytes) = resident_bytes() {
            let (name, unit) = ("process_resident_memory", Unit::Bytes);
            let help = "Resident memory.";
            let metric = encoder.encode_descriptor(name, help, Some(&unit), MetricType::Gauge)?;
            ConstGauge::new(bytes).encode(metric)?;
        }
        Ok(())
    }
}

/// Counts open descriptors, except the descriptor that reads the directory.
fn open_fds() -> Option<u64> {
    let entries = fs::read_dir("/proc/self/fd").ok()?;
    u64::try_from(entries.count().saturating_sub(1)).ok()
}

fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_is_counted() {
        let before = open_fds().unwrap();
        let files: Vec<_> = (0..50)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        // Other tests open and close fewer files in the meantime.
        assert!(open_fds().unwrap() >= before + 25);
        drop(files);
    }

    #[test]
    fn memory_is_in_bytes() {
        assert!(resident_bytes().unwrap() > 1024 * 1024);
    }
}
