//! Applications: busybox that serves HTTP and tells who asked.

use std::net::SocketAddr;

use anyhow::Context as _;
use integration::kubernetes::text;
use serde_json::{Value, json};

use crate::agent::Turn;

/// Where applications listen.
pub(crate) const PORT: u16 = 8080;

/// Serves `/`, and tells at `/cgi-bin/who` which address asked, and a file who asked there.
const SERVE: &str = r#"
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

/// A container that serves, with more said of it.
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

/// A pod's template.
pub(crate) fn template(app: &str, container: &Value) -> Value {
    json!({
        "metadata": {"labels": {"app": app}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    })
}

/// A Deployment of one pod, which is ready.
pub(crate) fn deploy(turn: &Turn<'_>, namespace: &str, app: &str, container: &Value) -> Value {
    make_deployment(turn, namespace, app, &template(app, container));
    ready(turn, namespace, app)
}

/// Makes a Deployment of one pod, by the template of which it is an application of that name.
pub(crate) fn make_deployment(turn: &Turn<'_>, namespace: &str, app: &str, template: &Value) {
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
    turn.server.create(&path, &object).unwrap();
}

/// Waits for the one pod of an application.
pub(crate) fn ready(turn: &Turn<'_>, namespace: &str, app: &str) -> Value {
    let label = format!("app={app}");
    let pods = turn.until_ready(namespace, &label, 1).unwrap();
    pods.first().unwrap().clone()
}

/// A pod that serves and is nobody's.
pub(crate) fn plain(turn: &Turn<'_>, namespace: &str, app: &str) {
    create(turn, namespace, app, &json!({}), &container(&json!({})));
}

/// A pod that is nobody's, with more in its spec.
pub(crate) fn create(turn: &Turn<'_>, namespace: &str, app: &str, more: &Value, container: &Value) {
    let mut object = template(app, container);
    let spec = object
        .pointer_mut("/spec")
        .unwrap()
        .as_object_mut()
        .unwrap();
    spec.extend(more.as_object().unwrap().clone());
    make_pod(turn, namespace, app, &object).unwrap();
}

/// Makes a pod that is nobody's, by a template.
pub(crate) fn make_pod(
    turn: &Turn<'_>,
    namespace: &str,
    name: &str,
    template: &Value,
) -> anyhow::Result<Value> {
    let mut object = template.clone();
    let metadata = object.pointer_mut("/metadata").context("metadata")?;
    let metadata = metadata.as_object_mut().context("a map")?;
    metadata.insert("name".to_owned(), json!(name));
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    turn.server.create(&path, &object)
}

/// Where a pod's application is.
pub(crate) fn address(pod: &Value) -> SocketAddr {
    let ip = text(pod, "/status/podIP").parse().context("an address");
    SocketAddr::new(ip.unwrap(), PORT)
}
