//! Fifty netns, half of them changed by others.

use std::time::{Duration, Instant};

use crate::drift::{
    start,
    watcher::{Watcher, generation, quiet},
};
use crate::harness::{Netconfig, pod_netns};
use crate::support::Fresh;

const PODS: usize = 50;

/// A change of a netns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    Flush,
    DeleteRule,
    DeleteIpRule,
    None,
}

struct Pod {
    name: String,
    fresh: Fresh,
    harm: Harm,
    /// The handle of the rule to delete.
    handle: String,
    before: (u32, String),
}

impl Pod {
    async fn new(number: usize, netconfig: &mut Netconfig) -> Self {
        let (name, fresh) = (format!("c{number}"), pod_netns());
        netconfig.claim(&name, &fresh).await.unwrap();
        netconfig.apply(&name).await;
        Self {
            name,
            harm: match number {
                0..10 => Harm::Flush,
                10..20 => Harm::DeleteRule,
                20..25 => Harm::DeleteIpRule,
                _ => Harm::None,
            },
            handle: first_handle(&fresh),
            before: state(&fresh),
            fresh,
        }
    }

    /// Returns when the change was done.
    fn harm(&self) -> Instant {
        match self.harm {
            Harm::Flush => drop(self.fresh.nft("flush ruleset")),
            Harm::DeleteRule => {
                let handle = &self.handle;
                let script = format!("delete rule inet inpod-nat output handle {handle}");
                self.fresh.nft(&script);
            }
            Harm::DeleteIpRule => drop(self.fresh.ip("rule del pref 500")),
            Harm::None => {}
        }
        Instant::now()
    }
}

fn first_handle(fresh: &Fresh) -> String {
    let listed = fresh.command("nft", &["-a", "list chain inet inpod-nat output"]);
    let handles = listed.lines().filter(|line| !line.contains('{'));
    let handle = handles.filter_map(|line| line.rsplit_once("# handle "));
    handle.map(|(_, handle)| handle.to_owned()).next().unwrap()
}

/// Returns the packet filter's generation, the routes and ip rules.
fn state(fresh: &Fresh) -> (u32, String) {
    let shown = [
        "-4 rule",
        "-6 rule",
        "route show table 10500",
        "-6 route show table 10500",
    ];
    let shown: Vec<_> = shown.iter().map(|arguments| fresh.ip(arguments)).collect();
    (fresh.run(generation), shown.concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drift_in_half_of_fifty_netns_is_told_within_a_second() {
    let mut netconfig = start(&["--verify-seconds", "3600"]).await;
    let mut pods = Vec::new();
    for number in 0..PODS {
        pods.push(Pod::new(number, &mut netconfig).await);
    }
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert_eq!(first.iter().filter(|state| state.intact).count(), PODS);
    quiet().await;
    assert_eq!(watcher.count(), 0, "all was reported at first");
    let reads = netconfig.metric("drift_reads_total").await;

    let changed: Vec<_> = pods.iter().map(Pod::harm).collect();
    for pod in pods.iter().filter(|pod| pod.harm != Harm::None) {
        watcher.wait_for_states(&pod.name, 1).await;
    }
    quiet().await;
    let mut slowest = Duration::ZERO;
    for (pod, changed) in pods.iter().zip(changed) {
        let (name, harm, reported) = (&pod.name, pod.harm, watcher.states(&pod.name));
        if harm == Harm::None {
            assert!(reported.is_empty(), "{name} is untouched: {reported:?}");
            continue;
        }
        assert_eq!(reported.len(), 1, "{name}, {harm:?}: {reported:?}");
        let (at, state) = reported.first().unwrap();
        assert_eq!(
            (state.intact, state.fingerprint.is_empty()),
            (false, harm == Harm::Flush),
            "{name}, {harm:?}"
        );
        slowest = slowest.max(at.saturating_duration_since(changed));
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    println!("reported at most {slowest:?} after the change");
    let reads = netconfig.metric("drift_reads_total").await - reads;
    // One of the fifty is read every 72 seconds.
    assert!(
        (25..28).contains(&reads),
        "{reads} reads of 25 changed netns"
    );
    nothing_was_written(&pods);
}

fn nothing_was_written(pods: &[Pod]) {
    for pod in pods {
        let (name, harm, (generation, routing)) = (&pod.name, pod.harm, state(&pod.fresh));
        let writes = generation - pod.before.0;
        let wanted = u32::from(matches!(harm, Harm::Flush | Harm::DeleteRule));
        assert_eq!(writes, wanted, "{name}, {harm:?}");
        let is_same = routing == pod.before.1;
        assert_eq!(is_same, harm != Harm::DeleteIpRule, "{name}, {harm:?}");
    }
}
