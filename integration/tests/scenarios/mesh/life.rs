//! The mesh changes, while a pod of one node asks a Service with pods on both nodes again and again: no request may fail,
//! except where ztunnels take over from each other.

use anyhow::ensure;
use integration::{
    TIMEOUT, eventually,
    kubernetes::{LONG, Report, Traffic},
};
use serde_json::json;

use crate::{
    cluster::agent::{AGENT, ExclusiveCluster, SYSTEM},
    mesh::{
        apps::{App, make_ambient, until_enrolled},
        control::{ISTIO, on_stock_ztunnels},
        wire::Wire,
    },
};

/// A client on the first node, and a Service.
pub(crate) struct Scene<'a> {
    cluster: &'a ExclusiveCluster<'a>,
    pub(crate) web: App<'a>,
    traffic: Traffic,
}

impl<'a> Scene<'a> {
    pub(crate) fn new(cluster: &'a ExclusiveCluster<'a>, replicas: usize) -> Self {
        make_ambient(cluster, "life");
        let web = App::deploy(cluster, "life", "web", None, replicas);
        let client = App::deploy(cluster, "life", "client", cluster.machines().first(), 1).pod();
        until_enrolled(cluster, &web.pods());
        cluster.until_enrolled(&client);
        Self {
            traffic: web.traffic_from(&client),
            cluster,
            web,
        }
    }

    /// Expects that every request was answered.
    pub(crate) fn end(self) {
        let report = self.report();
        assert_eq!(report.failed, [], "{} were answered", report.answered);
    }

    /// Expects that ztunnels lost at most one request of a hundred while one took over from another: ztunnel loses
    /// streams that cross its GOAWAY (deploy/docs/limits.md).
    pub(crate) fn end_after_takeover(self) {
        let report = self.report();
        let (answered, failed) = (report.answered, report.failed);
        assert!(failed.len() * 100 <= answered, "{answered}: {failed:?}");
    }

    fn report(self) -> Report {
        let report = self.traffic.end().unwrap();
        eprintln!(
            "{} requests answered, {} failed, slowest {:?}",
            report.answered,
            report.failed.len(),
            report.slowest
        );
        self.cluster.remove("life");
        report
    }
}

#[test]
fn ztunnels_are_rolled() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        cluster.roll(ISTIO, "daemonset/ztunnel");
        cluster.until_whole();
        scene.end_after_takeover();
    });
}

#[test]
fn istiod_and_the_api_server_restart() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        cluster.roll(ISTIO, "deployment/istiod");
        cluster.server.kill().unwrap();
        cluster.server.run().unwrap();
        cluster.until_whole();
        scene.end();
    });
}

#[test]
fn inpod_is_rolled_upgraded_uninstalled_and_installed() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        cluster.roll(SYSTEM, "daemonset/inpod");
        cluster.until_whole();
        cluster.upgrade(&["logging.level=debug"]);
        cluster.until_rolled(2);
        cluster.until_whole();
        cluster.uninstall();
        cluster.install();
        cluster.until_whole();
        for pod in &scene.web.pods() {
            cluster.until_found(pod);
        }
        scene.end();
    });
}

#[test]
fn a_namespace_loses_its_label_and_gets_it_again() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        let wire = Wire::watch(cluster).unwrap();
        cluster.label_namespace("life", None).unwrap();
        for pod in &scene.web.pods() {
            cluster.until_outside(pod);
        }
        eventually("the wire carries plaintext", LONG, || {
            let packets = wire.packets()?;
            ensure!(packets.plaintext > 0, "{packets:?}");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.label_namespace("life", Some("ambient")).unwrap();
        until_enrolled(cluster, &scene.web.pods());
        until_enrolled(
            cluster,
            &cluster.until_ready("life", "app=client", 1).unwrap(),
        );
        eventually("the wire carries no plaintext any more", LONG, || {
            let before = wire.packets()?;
            eventually("the wire carries HBONE", TIMEOUT, || {
                let packets = wire.packets()?;
                ensure!(packets.hbone > before.hbone + 100, "{packets:?}");
                anyhow::Ok(())
            })?;
            let now = wire.packets()?;
            ensure!(now.plaintext == before.plaintext, "{before:?} {now:?}");
            anyhow::Ok(())
        })
        .unwrap();
        scene.end();
    });
}

#[test]
fn a_deployment_grows_tenfold_under_strict() {
    on_stock_ztunnels(|cluster| {
        let mut scene = Scene::new(cluster, 2);
        let strict = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata:\n  name: strict\n  namespace: life\nspec: {mtls: {mode: STRICT}}\n";
        cluster.server.apply(strict).unwrap();
        scene.web.scale(20);
        until_enrolled(cluster, &scene.web.pods());
        scene.end();
    });
}

#[test]
fn pods_come_and_go_while_inpod_is_rolled() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        let mut churn = App::deploy(cluster, "life", "churn", None, 1);
        for is_rolled in [false, true] {
            churn.start_scaling(16);
            if is_rolled {
                cluster.roll(SYSTEM, "daemonset/inpod");
            }
            until_enrolled(cluster, &churn.pods());
            churn.scale(1);
        }
        cluster.until_whole();
        for pod in churn.pods() {
            let restarts = pod.pointer("/status/containerStatuses/0/restartCount");
            assert_eq!(restarts, Some(&json!(0)), "{pod}");
        }
        nothing_is_left_of_ended_pods(cluster);
        scene.end();
    });
}

/// Expects that the exempted addresses are those of the pods in the mesh.
fn nothing_is_left_of_ended_pods(cluster: &ExclusiveCluster<'_>) {
    let pods = cluster.pods("life", "").unwrap();
    assert_eq!(cluster.until_ready(SYSTEM, AGENT, 2).unwrap().len(), 2);
    for machine in cluster.machines() {
        eventually("the probe set has the pods of the node", TIMEOUT, || {
            let set = ["nft", "list", "set", "inet", "inpod-host", "probes-v4"];
            let printed = machine.exec(&set)?;
            let here = pods
                .iter()
                .filter(|pod| cluster.machine_of(pod).node == machine.node);
            let mut expected: Vec<_> = here
                .map(|pod| integration::kubernetes::text(pod, "/status/podIP"))
                .collect();
            let is_address = |word: &&str| word.starts_with("10.244.");
            let mut found: Vec<_> = printed.split([' ', ',', '\n']).filter(is_address).collect();
            expected.sort_unstable();
            found.sort_unstable();
            ensure!(expected == found, "{expected:?} {found:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}
