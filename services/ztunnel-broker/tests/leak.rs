//! A separate test binary, because descriptors are counted per process.

#[cfg(test)]
#[expect(dead_code, reason = "this binary uses a part of it")]
#[path = "broker/bench.rs"]
mod bench;

use std::{fs, time::Duration};

use bench::{Bench, SOON, workload};

/// The number of namespace descriptors that this process holds.
fn held() -> usize {
    let links = fs::read_dir("/proc/self/fd").into_iter().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let kinds = ["net:[", "uts:[", "ipc:["];
    links
        .filter(|link| {
            kinds
                .iter()
                .any(|kind| link.to_string_lossy().starts_with(kind))
        })
        .count()
}

#[tokio::test(start_paused = true)]
async fn held_descriptors_equal_held_workloads() {
    let (bench, ztunnel) = Bench::live(vec![workload("c0", "p0", 0, 1)]).await;
    assert_eq!(held(), 1);
    for round in 0..20_u64 {
        let add = bench.add(workload("c1", "p1", 1, 3 * round + 2), SOON);
        drop(ztunnel.ack_next().await);
        add.await.unwrap().unwrap();
        assert_eq!(held(), 2);
        bench.remove("c1", 3 * round + 3);
        // Closed at once, not only when ztunnel has acknowledged the Del.
        assert_eq!(held(), 1);
        drop(ztunnel.ack_next().await);
        let refused = bench.add(workload("c2", "p2", 2, 3 * round + 4), SOON);
        drop(ztunnel.next().await);
        ztunnel.nack("failure to start proxy").await;
        assert!(refused.await.unwrap().is_err());
        drop(ztunnel.ack_next().await);
        bench.remove("c2", 3 * round + 4);
        assert_eq!(held(), 1);
    }
    drop(ztunnel);
    let unserved = bench.add(workload("c3", "p3", 2, 99), Duration::from_secs(1));
    assert!(unserved.await.unwrap().is_err());
    assert_eq!(held(), 2);
    bench.set(100, vec![]);
    assert_eq!(held(), 0);
}
