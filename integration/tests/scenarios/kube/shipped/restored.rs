//! Rules that something else removes are restored within a second, each time.

use integration::App;

use super::*;

/// Fewer of each pod than pod-events repairs without a delay.
const REMOVALS: [&[&str]; 4] = [
    &["nft", "flush", "ruleset"],
    &["ip", "rule", "del", "pref", "500"],
    &["ip", "-6", "rule", "del", "pref", "500"],
    &["ip", "route", "flush", "table", "10500"],
];

/// Returns a pod's tables, ip rules and routes, in no order.
fn state(pod: &Pod) -> (Vec<String>, Vec<String>) {
    let mut traces = pod.traces().unwrap();
    traces.sort();
    // Only the tables that were removed recorded that inpod has set these sysctls.
    let rules = rules(pod).into_iter();
    let rules = rules.map(|table| table.replace(" switched=tcp_migrate_req", ""));
    let rules = rules.map(|table| table.replace(" ports=1,6,8,53", ""));
    (rules.collect(), traces)
}

#[test]
fn whatever_is_removed_from_a_pods_redirection_is_back_each_time() {
    let deployed = running();
    let [a, b, c, outsider] = start(
        &deployed,
        [Mesh::Inside, Mesh::Inside, Mesh::Inside, Mesh::Outside],
    );
    for pod in [a, b, c].iter().map(|living| &living.pod) {
        let _app = App::start(&pod.netns, PORT).unwrap();
        deployed.node.until_whole(&pod.spec).unwrap();
        let wanted = state(pod);
        for removal in REMOVALS {
            pod.exec(removal).unwrap();
            eventually("it is back", TIMEOUT, || {
                let now = state(pod);
                ensure!(now == wanted, "after {removal:?}: {now:?}, not {wanted:?}");
                anyhow::Ok(())
            })
            .unwrap();
            assert_path(&deployed, &outsider.pod, pod, &[(pod, 15006)]);
        }
    }
}
