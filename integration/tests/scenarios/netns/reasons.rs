//! Every failure carries a reason of the closed list, and none of pod-events hides behind "a defect".

use std::{fs, path::Path};

use inpod_proto::{
    failure_of,
    podevents::v1::{self as wire, pod_events_service_client::PodEventsServiceClient},
    types::v1 as types,
};
use inpod_types::Reason;
use integration::{Call, Inhabitant, Node, Pod, SERVICES, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use tokio::runtime::Runtime;
use tonic::{Request, Status, transport::Channel};

use crate::common::asking::{number, scrape};

/// Where pod-events may report a defect, and why.
const DEFECTS: [(&str, &str, usize); 4] = [
    (
        "clients/netconfig.rs",
        "another service's answer breaks the contract",
        1,
    ),
    ("tasks/registry.rs", "a pod's task has panicked", 1),
    ("tasks/registry/search.rs", "a search has panicked", 1),
    (
        "tasks/task/adoption.rs",
        "a UID that was parsed from Kubernetes is no container id",
        1,
    ),
];

fn code(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ").next().unwrap_or_default()
}

fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    found
}

#[test]
fn pod_events_calls_nothing_a_defect_but_what_is_listed_here() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let source = root.join("services/pod-events/src");
    let mut found = Vec::new();
    for path in files(&source) {
        let text = fs::read_to_string(&path).unwrap();
        let times = code(&text).matches("Reason::Internal").count();
        if times > 0 {
            let name = path.strip_prefix(&source).unwrap().display().to_string();
            found.push((name, times));
        }
    }
    found.sort();
    let listed = DEFECTS.map(|(file, _, times)| (file.to_owned(), times));
    assert_eq!(found, listed);
}

struct Asker {
    runtime: Runtime,
    client: PodEventsServiceClient<Channel>,
}

impl Asker {
    fn of(node: &Node) -> Self {
        let runtime = Runtime::new().unwrap();
        let _context = runtime.enter();
        let socket = inpod_service::socket(&node.run_dir(), "pod-events");
        let client = PodEventsServiceClient::new(inpod_service::channel(&socket));
        drop(_context);
        Self { runtime, client }
    }

    fn request<T>(message: T, millis: u64) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(std::time::Duration::from_millis(millis));
        request
    }

    fn add(&self, message: wire::AddPodRequest, millis: u64) -> Status {
        let mut client = self.client.clone();
        let call = client.add_pod(Self::request(message, millis));
        self.runtime.block_on(call).unwrap_err()
    }

    fn check(&self, pod: &Pod) -> Status {
        let mut client = self.client.clone();
        let sandbox = Some(sandbox(pod));
        let call = client.check_pod(Self::request(wire::CheckPodRequest { sandbox }, 10_000));
        self.runtime.block_on(call).unwrap_err()
    }

    fn explain(&self, pod: Option<types::PodSelector>) -> Status {
        let mut client = self.client.clone();
        let call = client.explain_pod(Self::request(wire::ExplainPodRequest { pod }, 10_000));
        self.runtime.block_on(call).unwrap_err()
    }

    fn resync(&self, pod: Option<types::PodSelector>) -> Status {
        let mut client = self.client.clone();
        let call = client.resync(Self::request(wire::ResyncRequest { pod }, 10_000));
        self.runtime.block_on(call).unwrap_err()
    }
}

fn sandbox(pod: &Pod) -> types::SandboxRef {
    types::SandboxRef {
        network_name: "podnet".into(),
        container_id: pod.container_id.clone(),
        ifname: "eth0".into(),
    }
}

fn named(pod: &Pod) -> types::PodSelector {
    types::PodSelector {
        namespace: pod.spec.namespace.clone(),
        name: pod.spec.name.clone(),
        uid: pod.spec.uid.clone(),
    }
}

fn add(pod: &Pod) -> wire::AddPodRequest {
    wire::AddPodRequest {
        sandbox: Some(sandbox(pod)),
        pod: Some(named(pod)),
        netns: Some(types::NetnsRef {
            path: pod.path().display().to_string(),
            ..types::NetnsRef::default()
        }),
        addresses: vec![pod.v4.to_string()],
    }
}

fn at(path: &str) -> Option<types::NetnsRef> {
    Some(types::NetnsRef {
        path: path.to_owned(),
        ..types::NetnsRef::default()
    })
}

/// The service itself set one of these reasons.
fn assert_reason(status: &Status, reasons: &[Reason]) {
    let failure = failure_of(status);
    assert!(!status.details().is_empty(), "no details: {status:?}");
    assert!(reasons.contains(&failure.reason), "{reasons:?}: {status:?}");
    assert_ne!(failure.reason, Reason::Internal, "{status:?}");
}

#[test]
fn every_way_in_which_an_add_fails_has_its_reason() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let other = node.pod(Spec::new("b").ambient()).unwrap();
    let asker = Asker::of(&node);
    let changed = |change: fn(&mut wire::AddPodRequest)| {
        let mut message = add(&pod);
        change(&mut message);
        asker.add(message, 10_000)
    };
    assert_reason(
        &asker.add(wire::AddPodRequest::default(), 5000),
        &[Reason::InvalidField],
    );
    assert_reason(
        &changed(|it| it.addresses = vec!["x".into()]),
        &[Reason::InvalidField],
    );
    let uid = |it: &mut wire::AddPodRequest| it.pod.as_mut().unwrap().uid = "other".into();
    assert_reason(&changed(uid), &[Reason::PodUidMismatch]);
    let nobody = |it: &mut wire::AddPodRequest| it.pod.as_mut().unwrap().name = "nobody".into();
    assert_reason(&changed(nobody), &[Reason::PodUnknown]);
    assert_reason(
        &changed(|it| it.netns = at("/etc/passwd")),
        &[Reason::NetnsPathRefused],
    );
    assert_reason(
        &changed(|it| it.netns = at("/run/netns/nothing")),
        &[Reason::NetnsMissing],
    );
    fs::write("/run/netns/a-file", "").unwrap();
    assert_reason(
        &changed(|it| it.netns = at("/run/netns/a-file")),
        &[Reason::NetnsNotANetns],
    );
    fs::remove_file("/run/netns/a-file").unwrap();
    assert_reason(
        &changed(|it| it.addresses = vec!["10.99.0.1".into()]),
        &[Reason::AddressMismatch],
    );
    let mut message = add(&pod);
    message.netns = at(&other.path().display().to_string());
    assert_reason(
        &asker.add(message, 10_000),
        &[Reason::NetnsInUse, Reason::AddressMismatch],
    );
    let mut message = add(&pod);
    message.netns = at(&node.netns().path().display().to_string());
    message.addresses = vec!["10.77.0.1".into()];
    assert_reason(&asker.add(message, 10_000), &[Reason::NetnsIsHost]);
    // A service that hangs.
    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    let late = asker.add(add(&pod), 1000);
    node.signal("netconfig", Signal::SIGCONT).unwrap();
    assert_reason(&late, &[Reason::DeadlineExceeded]);
}

#[test]
fn an_add_that_lacks_a_service_or_a_ztunnel_says_which() {
    let node = Node::new().unwrap();
    let start = |service: &&str| node.start(service);
    SERVICES.iter().try_for_each(start).unwrap();
    eventually("the agent is ready", TIMEOUT, || {
        anyhow::ensure!(node.api().status()?.ready, "it is not");
        anyhow::Ok(())
    })
    .unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let asker = Asker::of(&node);
    let never = asker.add(add(&pod), 5000);
    assert_reason(&never, &[Reason::ZtunnelNeverConnected]);
    node.start_ztunnel(&["--fault", "nack-adds"]).unwrap();
    let refused = || {
        let status = asker.add(add(&pod), 5000);
        let reason = failure_of(&status).reason;
        let refused = [Reason::ZtunnelRefused, Reason::ZtunnelQuarantined];
        anyhow::ensure!(refused.contains(&reason), "{status:?}");
        assert_reason(&status, &refused);
        anyhow::Ok(())
    };
    eventually("ztunnel refuses", TIMEOUT, refused).unwrap();
    let known = node.explain(&pod.spec).unwrap();
    let failure = known.last_failure.unwrap();
    assert!(
        !failure.message.is_empty() && !failure.remedy.is_empty(),
        "{failure:?}"
    );
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    assert_reason(
        &asker.add(add(&pod), 2000),
        &[Reason::DependencyUnavailable, Reason::DeadlineExceeded],
    );
}

#[test]
fn a_search_after_a_refused_add_does_not_replace_its_reason() {
    let node = Node::new().unwrap();
    let start = |service: &&str| node.start(service);
    SERVICES.iter().try_for_each(start).unwrap();
    node.healthy("pod-events").unwrap();
    let mut pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let asker = Asker::of(&node);
    let refused = asker.add(add(&pod), 3000);
    assert_reason(&refused, &[Reason::ZtunnelNeverConnected]);
    // The API server shows the addresses of before a reboot.
    pod.spec.addresses = pod.addresses().to_vec();
    node.write_manifest(&pod.spec).unwrap();
    eventually("its netns is missed", TIMEOUT, || {
        let text = scrape(&node, "pod-events")?;
        let name = "inpod_pod_events_retries_total{reason=\"NETNS_NOT_FOUND\"}";
        anyhow::ensure!(number(&text, name).is_some(), "{text}");
        anyhow::Ok(())
    })
    .unwrap();
    let failure = node.explain(&pod.spec).unwrap().last_failure.unwrap();
    assert_eq!(failure.reason(), types::Reason::ZtunnelNeverConnected);
}

#[test]
fn a_hurried_add_of_an_enrolled_pod_leaves_no_failure() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let mut repeated = add(&pod);
    let (netns, id) = (repeated.netns.as_mut().unwrap(), pod.netns.id());
    (netns.device, netns.inode) = (Some(id.device), Some(id.inode));
    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    let hurried = Asker::of(&node).add(repeated, 500);
    node.signal("netconfig", Signal::SIGCONT).unwrap();
    assert_reason(&hurried, &[Reason::DeadlineExceeded]);
    let healthy = eventually("its rules are verified", TIMEOUT, || {
        let known = node.explain(&pod.spec)?;
        let mut entries = known.timeline.iter();
        let fails = |event: &str| event.starts_with("failed: ");
        anyhow::ensure!(entries.any(|it| fails(&it.event)), "{:?}", known.timeline);
        anyhow::ensure!(known.last_failure.is_none(), "{:?}", known.last_failure);
        anyhow::Ok(known)
    });
    assert_eq!(healthy.unwrap().state(), wire::PodState::Enrolled);
}

#[test]
fn every_way_in_which_a_check_or_a_question_fails_has_its_reason() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let never = node.sandbox(Spec::new("b")).unwrap();
    let asker = Asker::of(&node);
    assert_reason(&asker.check(&never), &[Reason::SandboxUnknown]);
    assert_reason(&asker.explain(None), &[Reason::InvalidField]);
    let nobody = types::PodSelector {
        namespace: "bank".into(),
        name: "nobody".into(),
        uid: String::new(),
    };
    assert_reason(&asker.explain(Some(nobody.clone())), &[Reason::PodUnknown]);
    assert_reason(&asker.resync(Some(nobody.clone())), &[Reason::PodUnknown]);
    let by_uid = types::PodSelector {
        uid: "nobody".into(),
        ..types::PodSelector::default()
    };
    assert_reason(&asker.explain(Some(by_uid)), &[Reason::PodUnknown]);
    let another = types::PodSelector {
        uid: "another".into(),
        ..named(&pod)
    };
    assert_reason(&asker.explain(Some(another)), &[Reason::PodUidMismatch]);
    node.stop("ztunnel-broker", Signal::SIGKILL).unwrap();
    assert_reason(&asker.check(&pod), &[Reason::DependencyUnavailable]);
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    assert_reason(&asker.check(&pod), &[Reason::DependencyUnavailable]);
    // A query answers with what is available and names the rest.
    let known = node.explain(&pod.spec).unwrap();
    assert!(known.rules.is_none() && known.ztunnels.is_empty());
    let reported: Vec<_> = known
        .unavailable
        .iter()
        .map(|it| it.split(':').next())
        .collect();
    assert_eq!(
        reported,
        [Some("netconfig"), Some("netconfig"), Some("ztunnel-broker")]
    );
}

#[test]
fn a_deletion_that_cannot_be_acted_on_fails_nobody() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    let _app = Inhabitant::of(&pod).unwrap();
    node.stop("netconfig", Signal::SIGKILL).unwrap();
    let outcome = node.call(Call::del, &pod).run().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
}
