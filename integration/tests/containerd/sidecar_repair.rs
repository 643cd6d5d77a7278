//! `repair` beside a real containerd, for pods that cannot be redirected while they run.

use std::fs;

use anyhow::ensure;
use integration::{TIMEOUT, eventually, run};
use serde_json::{Value, json};

use crate::{
    api_server::ApiServer,
    kubelet::{Resident, Role, Shape, Stage},
    runtime::Runtime,
    sidecar::{end, outsider, passes_its_proxy, until_redirected},
    sidecar_missed::{fails, install, without_us},
};

const LABEL: &str = "/metadata/labels/cni.istio.io~1uninitialized";

/// Formats nanoseconds since 1970 as Kubernetes does.
fn time(nanoseconds: i64) -> String {
    let seconds = format!("@{}", nanoseconds / 1_000_000_000);
    let printed = run("date", &["-u", "-d", &seconds, "+%FT%TZ"]).unwrap();
    printed.trim().to_owned()
}

/// Shows the failed init container waiting for its next run, as a kubelet does.
pub(crate) fn report(server: &ApiServer, resident: &Resident<'_>, message: &str) {
    let ended = resident.ended(Role::Validation).unwrap();
    let has_failed = ended.exit_code != 0;
    let terminated = json!({"terminated": {
        "exitCode": ended.exit_code,
        "reason": if has_failed { "Error" } else { "Completed" },
        "message": message,
        "startedAt": time(ended.started_at),
        "finishedAt": time(ended.finished_at),
    }});
    let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let (state, last) = if has_failed {
        (waits, terminated)
    } else {
        (terminated, json!({}))
    };
    let spec = &resident.pod.spec;
    let status = json!({"name": Role::Validation.name(), "image": "validate", "imageID": "", "ready": !has_failed,
        "restartCount": 1, "state": state, "lastState": last});
    let addresses = spec
        .addresses
        .iter()
        .map(|ip| json!({"ip": ip.to_string()}));
    let addresses: Vec<_> = addresses.collect();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": spec.name, "namespace": spec.namespace, "uid": spec.uid, "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"nodeName": resident.runtime.node.name(), "containers": [{"name": "app", "image": "app"}]},
        "status": {"phase": if has_failed { "Pending" } else { "Running" }, "podIPs": addresses, "initContainerStatuses": [status]},
    });
    server.show(pod);
}

/// No running pod can be redirected here.
fn without_plugin_and_netconfig() -> (Runtime, ApiServer) {
    let runtime = without_us();
    let server = ApiServer::start(runtime.node.netns()).unwrap();
    for service in ["ztunnel-broker", "pod-events"] {
        runtime.node.start(service).unwrap();
    }
    runtime.node.start_ztunnel(&[]).unwrap();
    (runtime, server)
}

pub(crate) fn start_repair(runtime: &Runtime, server: &ApiServer, more: &[&str]) {
    let node = &runtime.node;
    let kubeconfig = node.kubeconfig();
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let kubeconfig = kubeconfig.display().to_string();
    let settings = [
        ["--peer", "uid"],
        ["--node-name", node.name()],
        ["--kubeconfig", &kubeconfig],
    ];
    let settings = settings.iter().flatten().chain(more);
    let settings: Vec<_> = settings.copied().collect();
    node.start_with("repair", &settings).unwrap();
}

/// Enables one action as soon as pod-events has had a second.
fn action_after_a_second(way: &str) -> [&str; 4] {
    ["--repair-wait-seconds", "1", way, "true"]
}

fn counted(runtime: &Runtime, way: &str, result: &str) -> u64 {
    let socket = inpod_service::socket(&runtime.node.run_dir(), "repair");
    let url = "http://localhost/metrics";
    let words = ["-sSf", "--unix-socket", socket.to_str().unwrap(), url];
    let text = run("curl", &words).unwrap_or_default();
    let series = format!("inpod_repair_pods_total{{type=\"{way}\",result=\"{result}\"}} ");
    let mut counts = text.lines().filter_map(|line| line.strip_prefix(&series));
    counts.next().map_or(0, |count| count.parse().unwrap())
}

pub(crate) fn until_counted(runtime: &Runtime, way: &str, result: &str, wanted: u64) {
    eventually("it is counted", TIMEOUT, || {
        let found = counted(runtime, way, result);
        ensure!(found == wanted, "{way} {result}: {found}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Creates a pod that failed validation, as the API server knows it.
fn broken<'a>(runtime: &'a Runtime, server: &ApiServer) -> Resident<'a> {
    let shape = Shape::Plain;
    let mut web = Resident::new(runtime, shape, shape.spec("web", 1)).unwrap();
    let message = fails(&mut web);
    report(server, &web, &message);
    web
}

fn until_labelled(server: &ApiServer, wanted: Option<&str>) {
    eventually("the pod bears the label", TIMEOUT, || {
        let pod = server.pod("web")?;
        let found = pod.pointer(LABEL).and_then(Value::as_str);
        ensure!(found == wanted, "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_whose_redirection_does_not_come_is_labelled_and_loses_the_label_when_it_serves() {
    let (runtime, server) = without_plugin_and_netconfig();
    let outsider = outsider(&runtime);
    let mut web = broken(&runtime, &server);
    start_repair(&runtime, &server, &action_after_a_second("--label-pods"));
    until_labelled(&server, Some("true"));
    until_counted(&runtime, "label", "success", 1);
    let reported = eventually("it is reported", TIMEOUT, || server.event("LabelBrokenPod"));
    let reported = reported.unwrap();
    assert!(
        reported.contains("pod-events has not redirected it yet"),
        "{reported}"
    );
    runtime.node.start("netconfig").unwrap();
    until_redirected(&runtime, &web.pod);
    assert_eq!(web.sync().unwrap(), Stage::Running);
    report(&server, &web, "");
    until_labelled(&server, None);
    until_counted(&runtime, "repair", "success", 1);
    passes_its_proxy(&web, &outsider);
    let asked = server.asked();
    let path = "PATCH /api/v1/namespaces/shop/pods/web/status";
    assert_eq!(asked, [path, path]);
    end(&runtime, &[&web, &outsider]);
}

#[test]
fn a_pod_whose_redirection_does_not_come_is_deleted_and_the_next_one_starts_and_serves() {
    let (runtime, server) = without_plugin_and_netconfig();
    let outsider = outsider(&runtime);
    let old = broken(&runtime, &server);
    start_repair(&runtime, &server, &action_after_a_second("--delete-pods"));
    eventually("the pod is deleted", TIMEOUT, || {
        let pod = server.pod("web")?;
        let deleted = pod.pointer("/metadata/deletionTimestamp");
        ensure!(deleted.is_some(), "{pod}");
        anyhow::Ok(())
    })
    .unwrap();
    until_counted(&runtime, "delete", "success", 1);
    // Its controller creates another on a node that works again.
    old.end().unwrap();
    server.forget("web");
    install(&runtime);
    runtime.node.start("netconfig").unwrap();
    runtime.node.ready().unwrap();
    let shape = Shape::Plain;
    let new = Resident::running(&runtime, shape, shape.spec("web", 2)).unwrap();
    until_redirected(&runtime, &new.pod);
    report(&server, &new, "");
    passes_its_proxy(&new, &outsider);
    assert_eq!(server.asked(), ["DELETE /api/v1/namespaces/shop/pods/web"]);
    assert!(
        server
            .pod("web")
            .unwrap()
            .pointer("/metadata/deletionTimestamp")
            .is_none()
    );
    end(&runtime, &[&new, &outsider]);
}
