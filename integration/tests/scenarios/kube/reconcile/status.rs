//! Early, late, wrong and missing addresses in a pod's status.

use integration::{App, Cgroups, Inhabitant};
use serde_json::json;

use super::*;

#[test]
fn a_pod_that_was_found_waits_for_its_addresses_and_is_enrolled_when_the_status_shows_them() {
    let cluster = Cluster::shared();
    let cgroups = Cgroups::new().unwrap();
    let uid = cluster.create(&cluster.object("late", Some("ambient")));
    let pod = cluster.sandbox("late", &uid);
    let process = Inhabitant::of(&pod).unwrap();
    cgroups.put(&pod, process.pid()).unwrap();
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    cluster.until_shown("late");
    // Another pod is served meanwhile.
    let other = cluster.pod("other", Some("ambient"));
    until_in(&cluster, &other, Reason::LabelOnPod);
    let known = cluster.node.explain(&pod.spec).unwrap();
    assert_ne!(known.state(), PodState::Enrolled);
    assert_eq!(pod.traces().unwrap(), NOTHING);
    set_status(&cluster, "late", &runs_in(&pod));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
}

#[test]
fn the_addresses_of_the_add_count_and_not_those_that_a_status_still_shows() {
    let cluster = Cluster::shared();
    let uid = cluster.create(&cluster.object("web", Some("ambient")));
    let stale =
        json!({"phase": "Pending", "podIP": "10.77.250.9", "podIPs": [{"ip": "10.77.250.9"}]});
    set_status(&cluster, "web", &stale);
    cluster.until_shown("web");
    let pod = cluster.sandbox("web", &uid);
    cluster.node.add(&pod).unwrap();
    let known = until_in(&cluster, &pod, Reason::LabelOnPod);
    let wanted = pod.addresses().map(|address| address.to_string());
    assert_eq!(known.addresses, wanted);
    let mut probed = probed(&cluster).unwrap();
    probed.sort();
    assert_eq!(probed, wanted);
}

#[test]
fn both_addresses_of_a_pod_are_probed_from_its_enrollment_to_its_withdrawal() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", None);
    assert_eq!(probed(&cluster).unwrap(), [""; 0]);
    label(&cluster, "web", &json!("ambient"));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let mut found = probed(&cluster).unwrap();
    found.sort();
    assert_eq!(found, pod.addresses().map(|address| address.to_string()));
    label(&cluster, "web", &json!("none"));
    until_out(&cluster, &pod, Reason::OptedOut);
    assert_eq!(probed(&cluster).unwrap(), [""; 0]);
}

#[test]
fn addresses_that_vanish_from_a_status_and_come_back_change_nothing_of_a_pod_that_runs() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    set_status(&cluster, "web", &runs_in(&pod));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let (rules, elements) = (pod.ruleset().unwrap(), probed(&cluster).unwrap());
    set_status(&cluster, "web", &json!({"podIP": null, "podIPs": null}));
    set_status(&cluster, "web", &runs_in(&pod));
    // A later pod proves that both arrived.
    let later = cluster.pod("later", None);
    until_out(&cluster, &later, Reason::NotSelected);
    let known = until_in(&cluster, &pod, Reason::LabelOnPod);
    let mut events = known.timeline.iter().map(|entry| &entry.event);
    let is_change = |event: &String| event.contains("changed") || event.contains("repaired");
    assert!(!events.any(is_change), "{:?}", known.timeline);
    assert_eq!(pod.ruleset().unwrap(), rules);
    assert_eq!(probed(&cluster).unwrap(), elements);
}

// scenario: 5
#[test]
fn an_address_that_a_running_pod_gets_is_probed_and_one_that_it_loses_is_not() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("web", Some("ambient"));
    set_status(&cluster, "web", &runs_in(&pod));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let follow = |address: &str| {
        let status = json!({"podIP": address, "podIPs": [{"ip": address}, {"ip": pod.v6}]});
        set_status(&cluster, "web", &status);
        eventually("the probe set follows", TIMEOUT, || {
            let mut found = probed(&cluster)?;
            found.sort();
            ensure!(
                found == [address.to_owned(), pod.v6.to_string()],
                "{found:?}"
            );
            anyhow::Ok(())
        })
        .unwrap();
    };
    pod.exec(&["ip", "addr", "add", "10.77.201.7/32", "dev", "eth0"])
        .unwrap();
    follow("10.77.201.7");
    follow(&pod.v4.to_string());
    until_in(&cluster, &pod, Reason::LabelOnPod);
}
