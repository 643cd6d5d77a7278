//! Applications: busybox serves HTTP and reports its clients.

use std::net::SocketAddr;

use anyhow::Context as _;
use integration::kubernetes::text;
use serde_json::{Value, json};

use crate::cluster::agent::ExclusiveCluster;

pub(crate) const PORT: u16 = 8080;

/// `/cgi-bin/who` returns the client's address; a file lists all clients.
pub(crate) const SERVE: &str = r#"
mkdir -p /tmp/www/cgi-bin
echo here >/tmp/www/index.html
cat >/tmp/www/cgi-bin/who <<'END'
#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
echo $REMOTE_ADDR
echo $REMOTE_ADDR >>/tmp/seen
END
/bin/busybox chmod +x /tmp/www/cgi-bin/who
exec /bin/httpd -f -p 8080 -h /tmp/www
"#;

/// Returns a serving container with additional fields.
pub(crate) fn container(more: &Value) -> Value {
    let mut container = json!({
        "name": "app", "image": "inpod.test/busybox:1", "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", SERVE],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    });
    if let (Some(all), Some(more)) = (container.as_object_mut(), more.as_object()) {
        all.extend(more.clone());
    }
    container
}

pub(crate) fn template(app: &str, container: &Value) -> Value {
    json!({
        "metadata": {"labels": {"app": app}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    })
}

/// Waits until its one pod is ready.
pub(crate) fn deploy(
    cluster: &ExclusiveCluster<'_>,
    namespace: &str,
    app: &str,
    container: &Value,
) -> Value {
    make_deployment(cluster, namespace, app, &template(app, container));
    ready(cluster, namespace, app)
}

/// Creates a Deployment of one pod; the template carries the application's name.
pub(crate) fn make_deployment(
    cluster: &ExclusiveCluster<'_>,
    namespace: &str,
    app: &str,
    template: &Value,
) {
    let object = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": app, "namespace": namespace},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": app}},
            "template": template,
        },
    });
    let path = format!("/apis/apps/v1/namespaces/{namespace}/deployments");
    cluster.server.create(&path, &object).unwrap();
}

pub(crate) fn ready(cluster: &ExclusiveCluster<'_>, namespace: &str, app: &str) -> Value {
    let label = format!("app={app}");
    let pods = cluster.until_ready(namespace, &label, 1).unwrap();
    pods.first().unwrap().clone()
}

pub(crate) fn plain(cluster: &ExclusiveCluster<'_>, namespace: &str, app: &str) {
    create(cluster, namespace, app, &json!({}), &container(&json!({})));
}

/// Additional fields go into its spec.
pub(crate) fn create(
    cluster: &ExclusiveCluster<'_>,
    namespace: &str,
    app: &str,
    more: &Value,
    container: &Value,
) {
    let mut object = template(app, container);
    let spec = object
        .pointer_mut("/spec")
        .unwrap()
        .as_object_mut()
        .unwrap();
    spec.extend(more.as_object().unwrap().clone());
    make_pod(cluster, namespace, app, &object).unwrap();
}

pub(crate) fn make_pod(
    cluster: &ExclusiveCluster<'_>,
    namespace: &str,
    name: &str,
    template: &Value,
) -> anyhow::Result<Value> {
    let mut object = template.clone();
    let metadata = object.pointer_mut("/metadata").context("metadata")?;
    let metadata = metadata.as_object_mut().context("a map")?;
    metadata.insert("name".to_owned(), json!(name));
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    cluster.server.create(&path, &object)
}

pub(crate) fn address(pod: &Value) -> SocketAddr {
    let ip = text(pod, "/status/podIP").parse().context("an address");
    SocketAddr::new(ip.unwrap(), PORT)
}
