//! Rules that something else removes are restored within a second, each time.

use std::time::{Duration, Instant};

use integration::App;

use super::*;

const RESTORED: Duration = Duration::from_secs(1);

#[test]
fn whatever_is_removed_from_a_pods_redirection_is_back_within_a_second_each_time() {
    let deployed = running();
    let [web, outsider] = start(&deployed, [Mesh::Inside, Mesh::Outside]);
    let _app = App::start(&web.pod.netns, PORT).unwrap();
    let pod = &web.pod;
    deployed.node.until_whole(&pod.spec).unwrap();
    let state = || {
        let mut traces = pod.traces().unwrap();
        traces.sort();
        // Only the tables that were removed recorded that inpod has set this sysctl.
        let rules = rules(pod).into_iter();
        let rules = rules.map(|table| table.replace(" switched=tcp_migrate_req", ""));
        (rules.collect::<Vec<_>>(), traces)
    };
    let wanted = state();
    let removals: [&[&str]; 4] = [
        &["nft", "flush", "ruleset"],
        &["ip", "rule", "del", "pref", "32764"],
        &["ip", "-6", "rule", "del", "pref", "32764"],
        &["ip", "route", "flush", "table", "100"],
    ];
    for removal in removals.iter().cycle().take(12) {
        pod.exec(removal).unwrap();
        let removed = Instant::now();
        eventually("it is back", TIMEOUT, || {
            let now = state();
            ensure!(now == wanted, "after {removal:?}: {now:?}, not {wanted:?}");
            anyhow::Ok(())
        })
        .unwrap();
        let took = removed.elapsed();
        assert!(took < RESTORED, "{removal:?}: {took:?}");
        assert_path(&deployed, &outsider.pod, pod, &[(pod, 15006)]);
    }
}
