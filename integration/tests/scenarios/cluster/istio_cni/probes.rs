//! The kubelet's probes during the change of agents. A connection from the node's network stands for a probe.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    App, ChainForm, Clients, Cluster, Duration, PORT, Running, Scene, Signal, SocketAddr, TIMEOUT,
    ensure, eventually, json, start_istio,
};

const SOURCES: [&str; 2] = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];

const PERIOD: Duration = Duration::from_millis(50);

const WAY: ChainForm = ChainForm {
    istio: &[],
    mode: "owned",
    ends: true,
};

/// Returns the addresses in inpod's probe set, none if there is no set.
fn exempted(scene: &Scene<'_>) -> BTreeSet<IpAddr> {
    let net = format!("--net={}", scene.cluster().node.netns().path().display());
    let list = |set| {
        let command = ["nft", "-j", "list", "set", "inet", "inpod-host", set];
        integration::run("nsenter", &[&[net.as_str()][..], &command].concat()).unwrap_or_default()
    };
    let listed = ["probes-v4", "probes-v6"].map(list).concat();
    let words = listed.split('"');
    words.filter_map(|word| word.parse().ok()).collect()
}

fn until_exempted_are(scene: &Scene<'_>, pods: &[&Running]) {
    let expected: BTreeSet<IpAddr> = pods.iter().flat_map(|it| it.pod.addresses()).collect();
    eventually("the probe set holds these pods", TIMEOUT * 2, || {
        let found = exempted(scene);
        ensure!(found == expected, "{found:?} instead of {expected:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Starts the services beside a running istio-cni, which serves the ZDS socket.
fn start_beside_istio(scene: &Scene<'_>) {
    for service in ["installer", "netconfig", "pod-events", "ztunnel-broker"] {
        scene.start(service);
    }
    let node = &scene.cluster().node;
    node.until_ended("ztunnel-broker").unwrap();
}

#[test]
fn probes_pass_by_ztunnel_during_the_change_of_agents() {
    let cluster = Cluster::on_own_server();
    let scene = Scene::new(&cluster, WAY);
    let (_kubelet, mut istio) = start_istio(&scene);
    let web = scene.pod("web", Some("ambient"));
    let _app = App::start(&web.pod.netns, PORT).unwrap();
    scene.until_enrolled_by_istio(&web.pod);
    let node = [("node", scene.cluster().node.netns().path())];
    let probes = web.pod.addresses();
    let probes = probes.map(|to| Clients::start_in(&node, SocketAddr::new(to, PORT), PERIOD));
    let probes: Vec<_> = probes.into_iter().collect();
    let probe = |count| probes.iter().for_each(|it| it.make(count).unwrap());
    probe(20);

    istio.delete_daemonset().unwrap();
    start_beside_istio(&scene);
    until_exempted_are(&scene, &[&web]);
    probe(20);
    assert!(istio.delete_pod().unwrap());
    let left = scene.of_the_host().to_lowercase();
    assert!(!left.contains("istio"), "{left}");
    // No agent serves ztunnel now.
    probe(40);
    scene.start("ztunnel-broker");
    cluster.until_served();
    scene.until_enrolled_by_inpod(&web.pod);
    probe(20);
    for (probes, source) in probes.into_iter().zip(SOURCES) {
        let source: IpAddr = source.parse().unwrap();
        let attempts = probes.stop().unwrap();
        let failed: Vec<_> = attempts
            .iter()
            .map(|attempt| &attempt.outcome)
            .filter(|outcome| !outcome.as_ref().is_ok_and(|seen| *seen == source))
            .collect();
        let (all, first) = (attempts.len(), failed.first());
        assert_eq!(failed.len(), 0, "of {all}, the first: {first:?}");
    }
}

#[test]
fn probe_set_drops_pods_that_leave_before_inpod_serves() {
    let cluster = Cluster::on_own_server();
    let scene = Scene::new(&cluster, WAY);
    let (_kubelet, istio) = start_istio(&scene);
    let names = [
        "kept",
        "unlabelled",
        "excluded",
        "deleted",
        "finished",
        "ended",
    ];
    let [kept, unlabelled, excluded, deleted, finished, ended] =
        names.map(|name| scene.pod(name, Some("ambient")));
    let outside = scene.pod("outside", None);
    for it in [&kept, &unlabelled, &excluded, &deleted, &finished, &ended] {
        scene.until_enrolled_by_istio(&it.pod);
    }
    istio.delete_daemonset().unwrap();
    start_beside_istio(&scene);
    let all = [&kept, &unlabelled, &excluded, &deleted, &finished, &ended];
    until_exempted_are(&scene, &all);

    scene.remove_label(&unlabelled.pod);
    let change = |running: &Running, change| {
        let path = cluster.path(&running.pod.spec.name);
        cluster.server.patch(&path, &change).unwrap();
    };
    change(
        &excluded,
        json!({"metadata": {"labels": {"istio.io/dataplane-mode": "none"}}}),
    );
    let delete = |running: Running| {
        let path = cluster.path(&running.pod.spec.name);
        cluster.server.delete(&path).unwrap();
        drop(running);
    };
    delete(deleted);
    let finish = json!({"status": {"phase": "Succeeded"}});
    let status = format!("{}/status", cluster.path(&finished.pod.spec.name));
    cluster.server.patch(&status, &finish).unwrap();
    until_exempted_are(&scene, &[&kept, &ended]);

    // A pod that ends while pod-events is away.
    cluster.node.stop("pod-events", Signal::SIGKILL).unwrap();
    delete(ended);
    scene.start("pod-events");
    until_exempted_are(&scene, &[&kept]);

    // A netconfig that starts anew finds no table.
    cluster.node.stop("netconfig", Signal::SIGKILL).unwrap();
    let net = format!("--net={}", cluster.node.netns().path().display());
    let delete_table = ["nft", "delete", "table", "inet", "inpod-host"];
    integration::run("nsenter", &[&[net.as_str()][..], &delete_table].concat()).unwrap();
    assert_eq!(exempted(&scene), BTreeSet::new());
    scene.start("netconfig");
    until_exempted_are(&scene, &[&kept]);
    drop((outside, unlabelled, excluded, finished, istio));
}
