//! Pods whose sidecar inpod's deployed injector adds: webhook, certificate and Service.

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{Image, LONG, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, SYSTEM, on_the_node},
    apps::{make_deployment, make_pod, ready},
    sidecar::{
        IMAGES, RESTRICTED, annotate, application, assert_unprivileged, load, serves_by_itself,
        serves_through_proxy, template, until_redirected,
    },
};

pub(crate) const INJECTOR: &str = "app.kubernetes.io/name=inpod-injector";

/// Not the default image: no registry is asked.
pub(crate) const VALUES: [&str; 2] = [
    "injector.enabled=true",
    "injector.config.proxy.image=inpod.test/sidecar:1",
];

/// Returns the names of a pod's containers of one kind.
fn names(pod: &Value, kind: &str) -> Vec<String> {
    let all = pod.pointer(&format!("/spec/{kind}"));
    let all = all.and_then(Value::as_array).into_iter().flatten();
    all.map(|it| text(it, "/name").to_owned()).collect()
}

/// Returns an application that only keeps its own probe.
pub(crate) fn plain(app: &str) -> Value {
    let mut template = template(app, &[], &[application()]);
    annotate(
        &mut template,
        "sidecar.istio.io/rewriteAppHTTPProbers",
        "false",
    );
    template
}

/// Creates a namespace to inject, with istiod's objects.
fn make_namespace(cluster: &ExclusiveCluster<'_>) {
    let (key, value) = RESTRICTED;
    cluster
        .make_namespace("inject", &json!({"istio-injection": "enabled", key: value}))
        .unwrap();
    let authority = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "istio-ca-root-cert"},
        "data": {"root-cert.pem": ""},
    });
    let path = "/api/v1/namespaces/inject/configmaps";
    cluster.server.create(path, &authority).unwrap();
}

/// Waits until the API server calls the injector, with dry-run pods.
pub(crate) fn until_asked(cluster: &ExclusiveCluster<'_>) {
    let mut pod = plain("probe");
    let metadata = pod.pointer_mut("/metadata").unwrap();
    let metadata = metadata.as_object_mut().unwrap();
    metadata.insert("name".to_owned(), json!("probe"));
    eventually("pods are injected", LONG, || {
        let path = "/api/v1/namespaces/inject/pods?dryRun=All";
        let made = cluster.server.create(path, &pod)?;
        let init = names(&made, "initContainers");
        ensure!(init.contains(&"istio-validation".to_owned()), "{init:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn pods_that_our_injector_gave_a_sidecar_start_where_no_right_is_admitted_and_serve_through_it() {
    on_the_node(|cluster| {
        load(cluster, &IMAGES);
        load(cluster, &[Image::Shipped("injector")]);
        cluster.upgrade(&VALUES);
        cluster.until_ready(SYSTEM, INJECTOR, 2).unwrap();
        make_namespace(cluster);
        until_asked(cluster);
        let mut among = plain("among");
        annotate(&mut among, "sidecar.istio.io/nativeSidecar", "false");
        let mut without = plain("without");
        let labels = without.pointer_mut("/metadata/labels").unwrap();
        *labels = json!({"app": "without", "sidecar.istio.io/inject": "false"});
        make_deployment(cluster, "inject", "native", &plain("native"));
        make_deployment(cluster, "inject", "among", &among);
        make_pod(cluster, "inject", "without", &without).unwrap();
        let proxied = ["istio-validation", "istio-proxy"];
        for (app, init, containers) in [
            ("native", &proxied[..], &["app"][..]),
            ("among", &proxied[..1], &["app", "istio-proxy"]),
        ] {
            let pod = ready(cluster, "inject", app);
            assert_eq!(names(&pod, "initContainers"), init);
            assert_eq!(names(&pod, "containers"), containers);
            until_redirected(cluster, &pod, "podnet");
            assert_unprivileged(cluster, &pod);
            serves_through_proxy(cluster, &pod);
        }
        let without = ready(cluster, "inject", "without");
        assert_eq!(names(&without, "containers"), ["app"]);
        serves_by_itself(cluster, &without);
        cluster.remove("inject");
        cluster.upgrade(&[]);
    });
}
