//! `deploy/try current` with real kubectl and helm: on a cluster without a mesh, with the reference ztunnel.

use std::{path::Path, process::Output};

use anyhow::bail;
use integration::{eventually, kubernetes::LONG, tool};
use tempfile::TempDir;

use crate::cluster::{
    agent::{ExclusiveCluster, on_the_node},
    trace,
};

const ZTUNNEL: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/scenarios/cluster/manifests/ztunnel.yaml"
);

fn deploy_try(cluster: &ExclusiveCluster<'_>, home: &TempDir, more: &[&str]) -> (Output, String) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/try");
    let output = cluster
        .server
        .beside(Path::new(script))
        .args(["current", "--context", "it", "--ztunnel", ZTUNNEL])
        .args(more)
        .env("KUBECTL", tool("KUBECTL").unwrap())
        .env("HELM", tool("HELM").unwrap())
        .env("KUBECONFIG", cluster.kubeconfig())
        .env("HOME", home.path())
        .output()
        .unwrap();
    let printed = [&output.stdout[..], &output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    (output, printed)
}

#[test]
fn deploy_try_makes_a_mesh_and_removes_it_without_a_trace() {
    on_the_node(|cluster| {
        let home = tempfile::tempdir().unwrap();
        let images = ["--hub", "localhost", "--image", "inpod.test/busybox:1"];
        let (refused, printed) = deploy_try(cluster, &home, &images);
        assert_eq!(refused.status.code(), Some(1), "{printed}");
        assert!(
            printed.contains("exists and was not made by this script"),
            "{printed}"
        );
        // The script removes no object of another owner.
        let (removed, printed) = deploy_try(cluster, &home, &["--remove"]);
        assert!(removed.status.success(), "{printed}");
        cluster.until_whole();

        cluster.uninstall();
        cluster
            .server
            .remove(include_str!("manifests/ztunnel.yaml"))
            .unwrap();
        eventually("no mesh is left", LONG, || {
            match cluster.server.get("/api/v1/namespaces/istio-system") {
                Err(_) => Ok(()),
                Ok(_) => bail!("its namespace is still there"),
            }
        })
        .unwrap();
        let (tried, printed) = deploy_try(cluster, &home, &images);
        println!("{printed}");
        assert!(tried.status.success(), "{printed}");
        assert_eq!(printed.matches("\nhello\n").count(), 2, "{printed}");
        assert!(printed.contains("State       enrolled"), "{printed}");
        let (removed, printed) = deploy_try(cluster, &home, &["--remove"]);
        println!("{printed}");
        assert!(removed.status.success(), "{printed}");
        assert_eq!(trace::of_the_node(cluster), *cluster.clean());
        for name in ["istio-system", "inpod-system", "inpod-try"] {
            let path = format!("/api/v1/namespaces/{name}");
            cluster.server.get(&path).unwrap_err();
        }

        let ztunnel = include_str!("manifests/ztunnel.yaml");
        cluster.server.apply(ztunnel).unwrap();
        cluster.install();
        cluster.until_whole();
    });
}
