//! A pod that ends slowly is captured and served until its last process exits.

use std::time::{Duration, Instant};

use integration::{App, Inhabitant};
use serde_json::json;

use super::*;
use integration::clients::{Attempt, Clients};

const PERIOD: Duration = Duration::from_millis(50);

/// An application, a process, and a client outside of the mesh that connects continuously.
struct Ending {
    cluster: Cluster,
    pod: Pod,
    process: Inhabitant,
    clients: Clients,
    _app: App,
    _outsider: Pod,
}

impl Ending {
    fn new() -> Self {
        let cluster = Cluster::shared();
        let pod = cluster.pod("web", Some("ambient"));
        let outsider = outsider(&cluster);
        let app = App::start(&pod.netns, PORT).unwrap();
        let process = Inhabitant::of(&pod).unwrap();
        until_in(&cluster, &pod, Reason::LabelOnPod);
        let to = SocketAddr::new(pod.v4.into(), PORT);
        let clients = Clients::start(&[&outsider], to, PERIOD);
        clients.make(5).unwrap();
        Self {
            cluster,
            pod,
            process,
            clients,
            _app: app,
            _outsider: outsider,
        }
    }

    /// Serves as long as a preStop hook and a grace period leave.
    fn serve_for(&self, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time {
            self.clients.make(10).unwrap();
            let served = served(&self.cluster);
            assert_eq!(served, [self.pod.spec.uid.as_str()]);
        }
        assert_eq!(self.cluster.node.api().claims().unwrap().len(), 1);
    }

    /// Until the last process ended, every connection must have been captured and served.
    fn exit(self) -> (Cluster, Pod) {
        let attempts = self.clients.stop().unwrap();
        assert!(attempts.len() > 20);
        let log = self.cluster.node.accesses().unwrap();
        let is_captured = |attempt: &Attempt| {
            let mut accepted = log
                .iter()
                .filter(|access| access.event == "accepted" && access.listener == 15006);
            accepted.any(|access| access.source == attempt.from)
        };
        for attempt in &attempts {
            assert!(
                attempt.outcome.is_ok() && is_captured(attempt),
                "{attempt:?}"
            );
        }
        drop(self.process);
        (self.cluster, self.pod)
    }
}

fn until_nothing_is_recorded(cluster: &Cluster) {
    let records = cluster.node.run_dir().join("pod-events/pods");
    eventually("nothing is recorded", TIMEOUT, || {
        let found = std::fs::read_dir(&records)?.count();
        ensure!(found == 0, "{found} records");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_that_is_deleted_gracefully_is_served_until_its_last_process_exits() {
    let ending = Ending::new();
    let gracefully = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 60});
    let how = ("DELETE", "application/json");
    let path = ending.cluster.path("web");
    let server = &ending.cluster.server;
    server.ask_as("admin", how, &path, &gracefully).unwrap();
    ending.serve_for(Duration::from_secs(10));
    let (cluster, pod) = ending.exit();
    // The kubelet stops the sandbox, then has the object deleted.
    cluster.node.del(&pod).unwrap();
    until_forgotten(&cluster, &pod);
    cluster.server.delete(&path).unwrap();
    until_nothing_is_recorded(&cluster);
}

#[test]
fn a_pod_that_is_deleted_by_force_is_served_for_sixty_seconds_until_its_last_process_exits() {
    if !integration::is_full_run() {
        return;
    }
    let ending = Ending::new();
    let path = ending.cluster.path("web");
    ending.cluster.server.delete(&path).unwrap();
    assert!(ending.cluster.server.get(&path).is_err());
    ending.serve_for(Duration::from_secs(62));
    let (cluster, pod) = ending.exit();
    // Its end is seen before any call reports it.
    until_forgotten(&cluster, &pod);
    until_nothing_is_recorded(&cluster);
    cluster.node.del(&pod).unwrap();
}

#[test]
fn a_job_whose_status_says_that_it_has_ended_is_forgotten_with_its_last_connection() {
    let cluster = Cluster::shared();
    let pod = cluster.pod("job", Some("ambient"));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    let to = SocketAddr::new(pod.v4.into(), PORT);
    let stream = integration::connect(&outsider.netns, to).unwrap();
    let (_, mut captured) = integration::source_seen(stream).unwrap();
    set_status(&cluster, "job", &json!({"phase": "Succeeded"}));
    eventually("it drains", TIMEOUT, || {
        let known = cluster.node.explain(&pod.spec)?;
        let mut events = known.timeline.iter().map(|entry| &entry.event);
        ensure!(
            events.any(|event| event.starts_with("draining 1 ")),
            "{known:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    integration::exchange(&mut captured, "still here").unwrap();
    drop(captured);
    until_out(&cluster, &pod, Reason::PodTerminal);
}
