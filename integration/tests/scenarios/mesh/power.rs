//! Nodes lose power, while pods send from their first instruction on: no packet may leave a node unencrypted.

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{LONG, Machine},
};
use serde_json::json;

use crate::{
    cluster::{agent::ExclusiveCluster, apps::container},
    mesh::{
        apps::{App, make_ambient, until_enrolled},
        control::on_stock_ztunnels,
        wire::Wire,
    },
};

/// Cuts the power of these nodes, and expects a mesh as before with nothing but HBONE on the wire meanwhile.
fn survives(nodes: std::ops::Range<usize>) {
    on_stock_ztunnels(|cluster| {
        make_ambient(cluster, "power");
        let [here, there] = [0, 1].map(|index| cluster.machines().get(index));
        let web = App::deploy(cluster, "power", "web", there, 1);
        let (beacons, back) = (
            beacon(cluster, "beacon", here, &web, 2),
            App::deploy(cluster, "power", "web-back", here, 1),
        );
        let returning = beacon(cluster, "beacon-back", there, &back, 2);
        let apps = [&web, &beacons, &back, &returning];
        for app in apps {
            until_enrolled(cluster, &app.pods());
        }
        let wire = Wire::watch(cluster).unwrap();
        until_hbone(&wire);
        let cut = cluster.machines().get(nodes).unwrap();
        cut.iter().try_for_each(Machine::cut_power).unwrap();
        cut.iter().try_for_each(Machine::switch_on).unwrap();
        cut.iter().try_for_each(Machine::until_ready).unwrap();
        cluster.until_whole();
        for app in apps {
            until_enrolled(cluster, &app.pods());
        }
        until_hbone(&wire);
        let packets = wire.packets().unwrap();
        eprintln!("{packets:?}");
        assert_eq!(packets.plaintext, 0);
        cluster.remove("power");
    });
}

/// Deploys pods that ask a Service of the other node from their first instruction on.
fn beacon<'a>(
    cluster: &'a ExclusiveCluster<'a>,
    name: &'a str,
    node: Option<&Machine>,
    to: &App<'_>,
    replicas: usize,
) -> App<'a> {
    let ask = format!(
        r"while :; do printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 2 {} {} >/tmp/answer; sleep 0.1; done",
        to.virtual_address().ip(),
        to.virtual_address().port()
    );
    let asks = container(&json!({
        "command": ["/bin/sh", "-c", ask],
        "readinessProbe": {"exec": {"command": ["/bin/busybox", "grep", "here", "/tmp/answer"]}, "periodSeconds": 1},
    }));
    App::deploy_with(cluster, ("power", name), node, replicas, &asks)
}

fn until_hbone(wire: &Wire<'_>) {
    let before = wire.packets().unwrap();
    eventually("the wire carries HBONE", LONG, || {
        let packets = wire.packets()?;
        ensure!(packets.hbone > before.hbone + 100, "{packets:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn power_cut_of_one_node_sends_nothing_unencrypted() {
    survives(1..2);
}

#[test]
fn power_cut_of_all_nodes_sends_nothing_unencrypted() {
    survives(0..2);
}
