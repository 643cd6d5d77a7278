//! Faults that a proxy in front of a real API server produces.

use std::time::{Duration, Instant};

use crate::common::cluster::{Cluster, refused};
use anyhow::{Context as _, ensure};
use inpod_proto::{podevents::v1::PodState, types::v1::Enrollment};
use integration::{Act, ApiProxy, Cut, Pod, Spec, TIMEOUT, Verb, eventually};
use serde_json::json;

const ALL: usize = usize::MAX;

/// Returns the queries of the lists, without those of a single key, which only ask for the server's version.
fn full_lists(proxy: &ApiProxy) -> Vec<String> {
    let asked = proxy.asked(Verb::List, "*").into_iter();
    let queries = asked.map(|asked| asked.query);
    queries
        .filter(|query| !query.contains("metadata.name"))
        .collect()
}

fn lists(proxy: &ApiProxy) -> usize {
    full_lists(proxy).len()
}

/// Waits for this many watches on pods; returns the last one's query.
fn until_watches(proxy: &ApiProxy, number: usize, patience: Duration) -> String {
    eventually("another watch begins", patience, || {
        let asked = proxy.asked(Verb::Watch, "pods");
        let found = asked.get(number - 1);
        let found = found.with_context(|| format!("{} watches", asked.len()))?;
        anyhow::Ok(found.query.clone())
    })
    .unwrap()
}

fn watches(proxy: &ApiProxy) -> usize {
    proxy.asked(Verb::Watch, "pods").len()
}

fn version(query: &str) -> u64 {
    let mut parts = query.split('&');
    let version = parts.find_map(|part| part.strip_prefix("resourceVersion="));
    version.unwrap().parse().unwrap()
}

fn label(cluster: &Cluster, pod: &str, mode: &str) {
    let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
    cluster.server.patch(&cluster.path(pod), &change).unwrap();
}

fn in_namespace(cluster: &Cluster, namespace: &str, name: &str) -> Pod {
    let mut object = cluster.object(name, Some("ambient"));
    *object.pointer_mut("/metadata/namespace").unwrap() = namespace.into();
    let spec = Spec {
        namespace: namespace.to_owned(),
        uid: cluster.create(&object),
        ..Spec::new(name)
    };
    cluster.node.sandbox(spec).unwrap()
}

/// Every request is refused: unknown pods follow their namespace, and the watch's next event corrects
/// that without a list.
fn refusals_are_survived(code: u16) {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let bank = format!("{}-bank", cluster.namespace);
    cluster.make_namespace(&bank, &json!({}));
    let known = cluster.pod("known", Some("ambient"));
    cluster.node.until_whole(&known.spec).unwrap();
    cluster.until_namespace_is_listed(&cluster.namespace);
    let listed = lists(&proxy);

    proxy.fault(Verb::Any, "*", ALL, Act::Refuse(code, None));
    proxy.cut(Cut::Broken);
    cluster.until_message(&["cannot watch pods", &code.to_string()]);
    let waits = in_namespace(&cluster, &cluster.namespace, "waits");
    let outcome = cluster.add_within(&waits, 9);
    let words = ["SOURCE_UNAVAILABLE", &code.to_string()];
    refused(&outcome, 11, &words);
    assert_eq!(waits.traces().unwrap(), Vec::<String>::new());
    let passes = in_namespace(&cluster, &bank, "passes");
    let outcome = cluster.add_within(&passes, 9);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let let_through = cluster.node.explain(&passes.spec).unwrap();
    assert_eq!(let_through.desired(), Enrollment::Unknown);
    cluster.node.until_whole(&known.spec).unwrap();

    proxy.heal();
    cluster.until_pods(true);
    cluster.node.until_whole(&passes.spec).unwrap();
    cluster.node.add(&waits).unwrap();
    cluster.node.until_whole(&waits.spec).unwrap();
    // Only a 500 may mean an invalid resource version of the watch.
    let again = lists(&proxy) - listed;
    assert!(code == 500 || again == 0, "{again} lists");
}

// scenario: 3
#[test]
fn while_nobody_is_let_in_an_add_follows_its_namespaces_policy_and_is_repaired() {
    refusals_are_survived(401);
}

// scenario: 3
#[test]
fn while_all_is_forbidden_an_add_follows_its_namespaces_policy_and_is_repaired() {
    refusals_are_survived(403);
}

// scenario: 3
#[test]
fn while_too_many_ask_an_add_follows_its_namespaces_policy_and_is_repaired() {
    refusals_are_survived(429);
}

// scenario: 3
#[test]
fn while_the_server_fails_an_add_follows_its_namespaces_policy_and_is_repaired() {
    refusals_are_survived(500);
}

/// One pod is created, one deleted and one relabelled without a watch, and the resource version is dropped.
fn a_forgotten_place_loses_nothing(gone: Act) {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let deleted = cluster.pod("deleted", Some("ambient"));
    cluster.node.until_whole(&deleted.spec).unwrap();
    let relabelled = cluster.pod("relabelled", None);
    let listed = proxy.asked(Verb::List, "pods").len();
    proxy.fault(Verb::Watch, "pods", ALL, Act::Refuse(503, None));
    proxy.cut(Cut::Broken);
    cluster.until_pods(false);
    let created = in_namespace(&cluster, &cluster.namespace, "created");
    cluster.server.delete(&cluster.path("deleted")).unwrap();
    label(&cluster, "relabelled", "ambient");
    let state = cluster.node.explain(&relabelled.spec).unwrap().state();
    assert_eq!(state, PodState::Out, "nothing was heard of it");

    proxy.heal();
    proxy.fault(Verb::Watch, "pods", 1, gone);
    cluster.until_pods(true);
    cluster.node.until_whole(&relabelled.spec).unwrap();
    cluster.until_shown("created");
    cluster.node.add(&created).unwrap();
    cluster.node.until_whole(&created.spec).unwrap();
    eventually("the pod that is gone is forgotten", TIMEOUT, || {
        let known = cluster.node.explain(&deleted.spec);
        ensure!(known.is_err(), "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    assert_eq!(proxy.asked(Verb::List, "pods").len(), listed + 1);
}

#[test]
fn a_410_within_a_watch_leads_to_a_list_and_loses_nothing() {
    a_forgotten_place_loses_nothing(Act::ErrorEvent(410));
}

#[test]
fn a_410_instead_of_a_watch_leads_to_a_list_and_loses_nothing() {
    a_forgotten_place_loses_nothing(Act::Refuse(410, None));
}

#[test]
fn a_list_in_another_order_changes_nothing() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let pods = ["a", "b", "c"].map(|name| cluster.pod(name, Some("ambient")));
    let plain = cluster.pod("d", None);
    let rules = pods.each_ref().map(|pod| {
        cluster.node.until_whole(&pod.spec).unwrap();
        pod.ruleset().unwrap()
    });
    let before = cluster.node.explain(&plain.spec).unwrap().timeline;
    let listed = lists(&proxy);
    proxy.fault(Verb::List, "*", ALL, Act::Reverse);
    proxy.fault(Verb::Watch, "*", 2, Act::ErrorEvent(410));
    proxy.cut(Cut::Broken);
    eventually("both kinds are listed again", TIMEOUT, || {
        let again = lists(&proxy) - listed;
        ensure!(again >= 2, "{again} lists");
        anyhow::Ok(())
    })
    .unwrap();
    cluster.until_pods(true);
    for (pod, rules) in pods.iter().zip(rules) {
        cluster.node.until_whole(&pod.spec).unwrap();
        assert_eq!(pod.ruleset().unwrap(), rules);
    }
    let after = cluster.node.explain(&plain.spec).unwrap().timeline;
    assert_eq!(before, after);
    label(&cluster, "d", "ambient");
    cluster.node.until_whole(&plain.spec).unwrap();
}

#[test]
fn a_watch_that_says_nothing_is_noticed_within_185_seconds_and_its_pod_is_enrolled() {
    if !integration::is_full_run() {
        return;
    }
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let pod = cluster.pod("web", None);
    let watched = watches(&proxy);
    proxy.fault(Verb::Watch, "pods", 1, Act::Silence);
    proxy.cut(Cut::Clean);
    until_watches(&proxy, watched + 1, TIMEOUT);
    let began = Instant::now();
    label(&cluster, "web", "ambient");
    let seen = cluster
        .node
        .until(&pod.spec, PodState::Enrolled, Duration::from_secs(200))
        .unwrap();
    assert_eq!(seen.desired(), Enrollment::Ambient);
    // A watch lasts at least 135 s, so only its event can have reported this.
    assert!(began.elapsed() > Duration::from_secs(120), "it was heard");
    cluster.until_pods(true);
}

#[test]
fn a_server_that_hangs_is_noticed_within_195_seconds_and_is_heard_again_when_it_speaks() {
    if !integration::is_full_run() {
        return;
    }
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let known = cluster.pod("known", Some("ambient"));
    cluster.node.until_whole(&known.spec).unwrap();
    let plain = cluster.pod("plain", None);
    let listed = lists(&proxy);
    proxy.hang();
    eventually("it is noticed", Duration::from_secs(200), || {
        let status = cluster.node.api().status()?;
        let mut all = status.conditions.iter();
        let pods = all.find(|found| found.name == "pods");
        ensure!(pods.is_some_and(|pods| !pods.ok), "{pods:?}");
        anyhow::Ok(())
    })
    .unwrap();
    cluster.until_message(&["the API server does not answer"]);
    label(&cluster, "plain", "ambient");
    cluster.node.until_whole(&known.spec).unwrap();
    proxy.heal();
    cluster
        .node
        .until(&plain.spec, PodState::Enrolled, Duration::from_secs(45))
        .unwrap();
    cluster.until_pods(true);
    // The other watch may have hung on until the server answered again: its silence is then taken for withheld events.
    let later = full_lists(&proxy).split_off(listed);
    assert!(later.len() <= 1, "{later:?}, but one watch resumed");
    let goes_on = |query: &String| query.contains("resourceVersionMatch=NotOlderThan");
    assert!(later.iter().all(goes_on), "{later:?}");
}

#[test]
fn a_server_that_asks_for_rest_gets_it() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let watched = watches(&proxy);
    let listed = lists(&proxy);
    proxy.fault(Verb::Watch, "pods", 1, Act::Refuse(429, Some(4)));
    proxy.cut(Cut::Broken);
    until_watches(&proxy, watched + 2, TIMEOUT);
    let asked = proxy.asked(Verb::Watch, "pods");
    let wait = asked[watched + 1].at - asked[watched].at;
    assert!(wait >= Duration::from_secs(4), "{wait:?}");
    cluster.until_pods(true);
    assert_eq!(lists(&proxy), listed);
}

#[test]
fn an_add_is_admitted_after_the_rest_that_the_server_asked_for() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    // The watch hides the pod, so its ADD must request it.
    proxy.fault(Verb::Watch, "pods", ALL, Act::Swallow);
    let watched = watches(&proxy);
    proxy.cut(Cut::Clean);
    until_watches(&proxy, watched + 1, TIMEOUT);
    proxy.fault(Verb::Get, "pods", 1, Act::Refuse(429, Some(2)));
    let pod = in_namespace(&cluster, &cluster.namespace, "web");
    let outcome = cluster.node.add(&pod).unwrap();
    assert!(outcome.took >= Duration::from_secs(2), "{outcome:?}");
    cluster.node.until_whole(&pod.spec).unwrap();
    let asked = proxy.asked(Verb::Get, "pods");
    assert!(asked[1].at - asked[0].at >= Duration::from_secs(2));
}

#[test]
fn a_watch_that_breaks_in_the_middle_of_an_event_loses_nothing() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let pod = cluster.pod("web", None);
    let (watched, listed) = (watches(&proxy), lists(&proxy));
    proxy.cut(Cut::MidEvent);
    label(&cluster, "web", "ambient");
    cluster.node.until_whole(&pod.spec).unwrap();
    until_watches(&proxy, watched + 1, TIMEOUT);
    label(&cluster, "web", "none");
    cluster
        .node
        .until(&pod.spec, PodState::Out, TIMEOUT)
        .unwrap();
    assert_eq!(lists(&proxy), listed);
}

#[test]
fn a_watch_whose_connection_breaks_is_taken_up_where_it_stood_without_a_list() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let pod = cluster.pod("web", None);
    let listed = lists(&proxy);
    for (cut, mode) in [(Cut::Broken, "ambient"), (Cut::Clean, "none")] {
        proxy.fault(Verb::Watch, "pods", 1, Act::Refuse(503, None));
        let watched = watches(&proxy);
        proxy.cut(cut);
        until_watches(&proxy, watched + 1, TIMEOUT);
        label(&cluster, "web", mode);
        let wanted = match mode {
            "none" => PodState::Out,
            _ => PodState::Enrolled,
        };
        cluster.node.until(&pod.spec, wanted, TIMEOUT).unwrap();
    }
    cluster.until_pods(true);
    assert_eq!(lists(&proxy), listed);
}

#[test]
fn bookmarks_move_the_place_of_a_watch_that_has_nothing_to_tell() {
    if !integration::is_full_run() {
        return;
    }
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let first = version(&until_watches(&proxy, 1, TIMEOUT));
    let listed = lists(&proxy);
    // Pods' resource version advances unseen by this node's watch.
    let mut elsewhere = cluster.object("elsewhere", None);
    elsewhere["spec"]["nodeName"] = "another-node".into();
    cluster.create(&elsewhere);
    let second = until_watches(&proxy, 2, Duration::from_secs(190));
    assert!(second.contains("allowWatchBookmarks=true"), "{second}");
    assert!(version(&second) > first, "{second}, after {first}");
    assert_eq!(lists(&proxy), listed);
}

#[test]
fn a_server_that_takes_two_seconds_for_an_answer_still_admits_an_add() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Watch, "pods", ALL, Act::Swallow);
    proxy.fault(Verb::Any, "*", ALL, Act::Wait(Duration::from_secs(2)));
    let watched = watches(&proxy);
    proxy.cut(Cut::Clean);
    until_watches(&proxy, watched + 1, TIMEOUT);
    let pod = in_namespace(&cluster, &cluster.namespace, "web");
    let outcome = cluster.node.add(&pod).unwrap();
    let limit = Duration::from_secs(2)..Duration::from_secs(40);
    assert!(limit.contains(&outcome.took), "{outcome:?}");
    cluster.node.until_whole(&pod.spec).unwrap();
}

#[test]
fn a_pod_of_which_the_watch_says_nothing_is_found_by_its_add() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    proxy.fault(Verb::Watch, "pods", ALL, Act::Swallow);
    let watched = watches(&proxy);
    proxy.cut(Cut::Clean);
    until_watches(&proxy, watched + 1, TIMEOUT);
    let pod = in_namespace(&cluster, &cluster.namespace, "web");
    cluster.node.add(&pod).unwrap();
    cluster.node.until_whole(&pod.spec).unwrap();
    assert_eq!(proxy.asked(Verb::Get, "pods").len(), 1);
}

/// Returns the queries of the lists of a kind from this number on.
fn list_queries(proxy: &ApiProxy, resource: &str, from: usize) -> Vec<String> {
    let asked = proxy.asked(Verb::List, resource).into_iter();
    asked.skip(from).map(|asked| asked.query).collect()
}

#[test]
fn a_starting_agent_lists_each_kind_once_from_the_cache() {
    let (cluster, proxy) = Cluster::behind_proxy();
    for number in 0..250 {
        cluster.create(&cluster.object(&format!("p-{number}"), None));
    }
    cluster.start();
    cluster.until_pods(true);
    cluster.until_shown("p-249");
    let node = format!("&fieldSelector=spec.nodeName%3D{}", cluster.node.name());
    let pods = list_queries(&proxy, "pods", 0);
    assert_eq!(pods, [format!("{node}&resourceVersion=0")]);
    let namespaces = list_queries(&proxy, "namespaces", 0);
    assert_eq!(namespaces, ["&resourceVersion=0"]);
}

#[test]
fn an_expired_watch_is_listed_not_older_than_its_version() {
    let (cluster, proxy) = Cluster::running_behind_proxy();
    let listed = lists(&proxy);
    let before = ["pods", "namespaces"].map(|resource| {
        let asked = |verb| proxy.asked(verb, resource).len();
        (resource, asked(Verb::Watch), asked(Verb::List))
    });
    proxy.fault(Verb::Watch, "*", 2, Act::ErrorEvent(410));
    proxy.cut(Cut::Broken);
    eventually("both kinds are listed again", TIMEOUT, || {
        let again = lists(&proxy) - listed;
        ensure!(again == 2, "{again} lists");
        anyhow::Ok(())
    })
    .unwrap();
    for (resource, watched, listed) in before {
        let expired = version(&proxy.asked(Verb::Watch, resource)[watched].query);
        let queries = list_queries(&proxy, resource, listed);
        let wanted = format!("&resourceVersion={expired}&resourceVersionMatch=NotOlderThan");
        assert!(queries[0].ends_with(&wanted), "{queries:?}, not {wanted}");
    }
    cluster.until_pods(true);
}
