use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use anyhow::ensure;
use inpod_proto::podevents::v1::{AddPodResponse, DeletePodResponse};
use integration::{
    Called, Held, Moment, Named, Node, Pod, Proxy, SERVICES, Spec, Step, TIMEOUT, Verbs,
    eventually, number,
};

/// The plugin's time limit for the agent's answer to an ADD.
pub(crate) const PLUGIN: Duration = Duration::from_secs(30);

/// State that an ADD leaves: UIDs at the broker, claims' paths, the number of checkpoint records.
pub(crate) type Known = (BTreeSet<String>, BTreeSet<String>, usize);

pub(crate) struct Bench {
    pub(crate) node: Node,
    pub(crate) verbs: Verbs,
}

impl Bench {
    pub(crate) fn over(node: Node) -> Self {
        let socket = inpod_service::socket(&node.run_dir(), "pod-events");
        let verbs = Verbs::at(&socket).unwrap();
        Self { node, verbs }
    }

    pub(crate) fn without_ztunnel() -> Self {
        let node = Node::new().unwrap();
        SERVICES
            .iter()
            .try_for_each(|service| node.start(service))
            .unwrap();
        let bench = Self::over(node);
        eventually("the agent is ready", TIMEOUT, || {
            ensure!(bench.node.api().status()?.ready, "not yet");
            anyhow::Ok(())
        })
        .unwrap();
        bench
    }

    /// Works on one ADD at a time, with a proxy between its services.
    pub(crate) fn with_one_permit() -> (Self, Proxy) {
        let node = Node::new().unwrap();
        let behind = node.run_dir().with_file_name("behind");
        let proxy = Proxy::start(&node.run_dir(), &behind).unwrap();
        for service in ["netconfig", "ztunnel-broker"] {
            node.start_at(&behind, service, &["--peer", "uid"]).unwrap();
        }
        node.start_with("pod-events", &["--peer", "uid", "--max-adds", "1"])
            .unwrap();
        node.start_ztunnel(&[]).unwrap();
        node.ready().unwrap();
        (Self::over(node), proxy)
    }

    pub(crate) fn hold_permit(&self, proxy: &Proxy, pod: &Pod) -> (Held, Called<AddPodResponse>) {
        let held = proxy.hold(Step {
            method: "ClaimNetns",
            moment: Moment::Before,
        });
        let add = self.verbs.add(&Named::of(pod), PLUGIN);
        held.reached().unwrap();
        (held, add)
    }

    pub(crate) fn adds(&self, sandboxes: &[Named]) -> Vec<Called<AddPodResponse>> {
        let add = |sandbox| self.verbs.add(sandbox, PLUGIN);
        sandboxes.iter().map(add).collect()
    }

    pub(crate) fn dels(&self, sandboxes: &[Named]) -> Vec<Called<DeletePodResponse>> {
        sandboxes.iter().map(|it| self.verbs.del(it)).collect()
    }

    pub(crate) fn warm(&self) {
        let path = Path::new("/run/netns/e");
        let nobody = Named::at(&Spec::new("nobody"), &"e".repeat(64), path);
        self.verbs.answers(self.dels(&vec![nobody; 8])).unwrap();
    }

    pub(crate) fn until_known(&self, pods: &[Pod]) {
        pods.iter()
            .try_for_each(|pod| self.node.until_known(&pod.spec))
            .unwrap();
    }

    pub(crate) fn metric(&self, name: &str) -> f64 {
        let socket = inpod_service::socket(&self.node.run_dir(), "pod-events");
        let metrics = self.verbs.metrics(&socket).unwrap();
        number(&metrics, &format!("inpod_pod_events_{name}"))
    }

    pub(crate) fn until(&self, name: &str, wanted: f64) {
        eventually(name, TIMEOUT, || {
            let found = self.metric(name);
            ensure!((found - wanted).abs() < 0.5, "{found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// An ADD that waits for a permit shows that calls are arriving.
    pub(crate) fn until_busy(&self) {
        eventually("an ADD waits for its turn", TIMEOUT, || {
            ensure!(self.metric("adds_waiting") > 0.5, "none does");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn until_claimed(&self, count: usize) {
        eventually("all are claimed", TIMEOUT, || {
            let claims = self.node.api().claims()?.len();
            ensure!(claims == count, "{claims}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn descriptors(&self) -> Vec<usize> {
        let count = |service: &&str| {
            let pid = self.node.pid(service).unwrap();
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
        };
        SERVICES.iter().map(count).collect()
    }

    /// Returns the peak memory of pod-events, in KiB.
    pub(crate) fn peak(&self) -> u64 {
        let pid = self.node.pid("pod-events").unwrap();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let text = line.unwrap().trim().trim_end_matches("kB").trim();
        text.parse().unwrap()
    }

    pub(crate) fn known(&self) -> Known {
        let workloads = self.node.api().workloads().unwrap().workloads;
        let uids = workloads.into_iter().map(|it| it.workload.unwrap().uid);
        let claims = self.node.api().claims().unwrap();
        let paths = claims.into_iter().map(|claim| claim.path);
        let records = self.node.run_dir().join("pod-events/pods");
        let records = fs::read_dir(records).unwrap().count();
        (uids.collect(), paths.collect(), records)
    }
}

pub(crate) fn specs(prefix: &str, count: usize) -> Vec<Spec> {
    let name = |number| format!("{prefix}-{number}");
    (0..count).map(|number| Spec::new(&name(number))).collect()
}

pub(crate) fn ambient(prefix: &str, count: usize) -> Vec<Spec> {
    specs(prefix, count)
        .into_iter()
        .map(Spec::ambient)
        .collect()
}

pub(crate) fn named(pods: &[Pod]) -> Vec<Named> {
    pods.iter().map(Named::of).collect()
}

/// Returns sandboxes whose netns no service opens or that have none. `first` separates their ids from others.
pub(crate) fn without_netns(node: &Node, specs: &[Spec], first: usize) -> Vec<Named> {
    specs
        .iter()
        .try_for_each(|spec| node.write_manifest(spec))
        .unwrap();
    let name = |(number, spec): (usize, &Spec)| {
        let id = format!("{:064x}", 0xf000_0000 + first + number);
        let path = format!("/run/netns/no-{}", spec.name);
        Named::at(spec, &id, Path::new(&path))
    };
    specs.iter().enumerate().map(name).collect()
}
