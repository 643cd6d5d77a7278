//! Compares every manifest's workloads with the table.

use std::collections::{BTreeMap, BTreeSet};

use inpod_service::peer::Cgroup;
use serde_json::{Value, json};

use crate::{
    list, manifests, objects, read,
    table::{How, OF_REPAIR, OVER, PLATFORMS, Platform, REPAIR, RIGHTS, Rights, TOKEN},
    text, words,
};

pub(crate) fn of_kind(name: &str, kinds: &[&str]) -> Vec<Value> {
    let mut found = objects(name);
    found.retain(|object| kinds.contains(&text(object, "/kind")));
    found
}

pub(crate) fn pods(manifest: &str) -> Vec<(String, Value)> {
    let makers = of_kind(
        manifest,
        &["DaemonSet", "Job", "Deployment", "StatefulSet", "Pod"],
    );
    let pod = |maker: Value| {
        (
            text(&maker, "/metadata/name").to_owned(),
            maker["spec"]["template"].clone(),
        )
    };
    makers.into_iter().map(pod).collect()
}

/// Returns containers of a platform's DaemonSets, each with its pod.
fn containers(platform: &Platform) -> Vec<(Value, Value)> {
    let mut found = Vec::new();
    for (_, pod) in pods(platform.name) {
        let spec = &pod["spec"];
        found.extend(
            list(spec, "containers")
                .iter()
                .map(|it| (it.clone(), pod.clone())),
        );
    }
    found
}

fn rights_of(container: &Value) -> &'static Rights {
    let name = text(container, "/name");
    let mut all = RIGHTS.iter();
    all.find(|rights| rights.container == name)
        .unwrap_or_else(|| panic!("{name} is not in the table"))
}

fn each(mut check: impl FnMut(&Platform, &Rights, &Value, &Value)) {
    for platform in &PLATFORMS {
        let all = containers(platform);
        let without = usize::from(!platform.has_repair());
        assert_eq!(all.len(), RIGHTS.len() - without, "{}", platform.name);
        for (container, pod) in all {
            check(platform, rights_of(&container), &container, &pod);
        }
    }
}

#[test]
fn every_manifest_is_checked() {
    let mut known: Vec<_> = PLATFORMS.iter().map(|platform| platform.name).collect();
    known.extend(OVER.map(|(name, ..)| name));
    known.extend(["injector", "leave"]);
    known.sort_unstable();
    assert_eq!(manifests(), known);
}

#[test]
fn a_container_has_exactly_its_capabilities_and_may_not_get_more() {
    each(|platform, rights, container, _| {
        let context = &container["securityContext"];
        let added = words(&context["capabilities"]["add"]);
        let at = (platform.name, rights.container);
        assert_eq!(added, rights.capabilities, "{at:?}");
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]), "{at:?}");
        let fixed = [
            ("allowPrivilegeEscalation", json!(false)),
            ("privileged", json!(false)),
            ("readOnlyRootFilesystem", json!(true)),
            ("runAsUser", json!(0)),
            ("seccompProfile", json!({"type": "RuntimeDefault"})),
        ];
        for (field, wanted) in fixed {
            assert_eq!(context[field], wanted, "{at:?} {field}");
        }
        let unconfined = context["appArmorProfile"]["type"] == "Unconfined";
        assert_eq!(unconfined, rights.is_unconfined, "{at:?}");
    });
}

#[test]
fn a_unit_of_systemd_has_exactly_the_capabilities_of_the_container() {
    for service in ["netconfig", "ztunnel-broker", "pod-events"] {
        let unit = read(&format!("deploy/systemd/inpod-{service}.service"));
        let mut lines = unit.lines();
        let bound = lines.find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
        let bound = bound.unwrap().split_whitespace();
        let bound: Vec<_> = bound.map(|name| name.trim_start_matches("CAP_")).collect();
        let mut rights = RIGHTS.iter();
        let rights = rights.find(|rights| rights.container == service).unwrap();
        assert_eq!(bound, rights.capabilities, "{service}");
    }
}

#[test]
fn only_openshift_has_a_type_of_selinux() {
    each(|platform, rights, container, _| {
        let options = &container["securityContext"]["seLinuxOptions"];
        let wanted = match platform.name {
            "openshift" => json!({"type": "spc_t"}),
            _ => Value::Null,
        };
        assert_eq!(*options, wanted, "{} {}", platform.name, rights.container);
    });
}

/// Mounts by the table: mount path, host path, mode.
fn meant(platform: &Platform, rights: &Rights) -> BTreeMap<String, (String, String)> {
    let mut meant = BTreeMap::new();
    let shows_repair = platform.has_repair() && rights.container == "pod-events";
    let more = shows_repair.then_some(&OF_REPAIR);
    for (place, how) in rights.mounts.iter().chain(more) {
        let how = format!("{how:?}");
        if *place == "NETNS" {
            let path = platform.netns[0];
            for at in platform.netns {
                meant.insert((*at).to_owned(), (path.to_owned(), how.clone()));
            }
            continue;
        }
        let place = place
            .replace("CONF", platform.conf)
            .replace("BIN", platform.bin)
            .replace("RUNTIME", platform.runtime());
        let path = place.strip_prefix("/host").unwrap_or(&place).to_owned();
        meant.insert(place, (path, how));
    }
    meant
}

fn how(mount: &Value) -> How {
    let is_read = mount["readOnly"] == true;
    match mount["mountPropagation"].as_str() {
        Some("HostToContainer") if is_read => How::Follow,
        None if is_read => How::Read,
        None => How::Write,
        Some(_) => panic!("{mount} is not in the table"),
    }
}

#[test]
fn a_container_is_given_exactly_its_paths_of_the_node() {
    each(|platform, rights, container, pod| {
        let volumes = list(&pod["spec"], "volumes");
        let mut of_node = BTreeMap::new();
        let mut others = BTreeSet::new();
        for mount in list(container, "volumeMounts") {
            assert_eq!(mount.get("subPath"), None, "{mount}");
            let place = text(mount, "/mountPath").to_owned();
            let mut named = volumes
                .iter()
                .filter(|volume| volume["name"] == mount["name"]);
            let volume = named.next().unwrap();
            if let Some(path) = volume.pointer("/hostPath/path") {
                let what = (
                    path.as_str().unwrap().to_owned(),
                    format!("{:?}", how(mount)),
                );
                of_node.insert(place, what);
            } else {
                assert_eq!(mount["readOnly"], true, "{mount}");
                others.insert(place);
            }
        }
        let at = (platform.name, rights.container);
        assert_eq!(of_node, meant(platform, rights), "{at:?}");
        let wanted = rights.others.iter().map(|place| (*place).to_owned());
        assert_eq!(others, wanted.collect(), "{at:?}");
    });
}

#[test]
fn a_volume_is_a_directory_of_the_node_the_token_the_word_to_leave_or_the_pods_name() {
    for platform in &PLATFORMS {
        for (workload, pod) in pods(platform.name) {
            let mounted: BTreeSet<_> = list(&pod["spec"], "containers")
                .iter()
                .flat_map(|container| list(container, "volumeMounts"))
                .map(|mount| text(mount, "/name"))
                .collect();
            for volume in list(&pod["spec"], "volumes") {
                assert!(
                    mounted.contains(text(volume, "/name")),
                    "{workload}: nobody mounts {volume}"
                );
                let kind = volume
                    .as_object()
                    .unwrap()
                    .keys()
                    .find(|key| *key != "name")
                    .unwrap();
                match kind.as_str() {
                    "hostPath" => assert_eq!(text(volume, "/hostPath/type"), "DirectoryOrCreate"),
                    "configMap" => assert_eq!(
                        volume["configMap"],
                        json!({"name": "inpod-leave", "optional": true})
                    ),
                    "downwardAPI" => assert_eq!(
                        volume["downwardAPI"]["items"],
                        json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}])
                    ),
                    "projected" => assert!(
                        ["inpod", "inpod-repair"].contains(&&*workload),
                        "{workload}"
                    ),
                    other => panic!("{workload}: {other}"),
                }
            }
        }
    }
}

#[test]
fn one_container_of_a_pod_has_a_token_and_it_ends_within_an_hour() {
    each(|platform, rights, container, pod| {
        let mut mounts = list(container, "volumeMounts").iter();
        let token = mounts.find(|mount| mount["mountPath"] == TOKEN);
        assert_eq!(token.is_some(), rights.has_token, "{}", platform.name);
        assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
        let tokens: Vec<_> = list(&pod["spec"], "volumes")
            .iter()
            .flat_map(|volume| list(&volume["projected"], "sources"))
            .filter_map(|source| source.get("serviceAccountToken"))
            .collect();
        let account = text(pod, "/spec/serviceAccountName");
        let has_it = ["pod-events", "inpod-repair"].contains(&account);
        assert_eq!(tokens.len(), usize::from(has_it));
        assert!(
            tokens
                .iter()
                .all(|token| token["expirationSeconds"] == 3600)
        );
    });
}

#[test]
fn an_agents_pod_shares_the_nodes_network_and_pids_and_that_of_repair_shares_nothing() {
    each(|platform, rights, _, pod| {
        let spec = &pod["spec"];
        let shared = if rights.container == REPAIR {
            Value::Null
        } else {
            json!(true)
        };
        for (field, wanted) in [
            ("hostNetwork", shared.clone()),
            ("hostPID", shared),
            ("hostIPC", Value::Null),
            ("hostUsers", Value::Null),
            ("enableServiceLinks", json!(false)),
            ("initContainers", Value::Null),
            ("ephemeralContainers", Value::Null),
            ("priorityClassName", json!("system-node-critical")),
            ("terminationGracePeriodSeconds", json!(30)),
        ] {
            assert_eq!(spec[field], wanted, "{} {field}", platform.name);
        }
    });
}

#[test]
fn the_agents_pods_tolerate_every_startup_taint() {
    for platform in &PLATFORMS {
        for (workload, pod) in pods(platform.name) {
            let tolerations = list(&pod["spec"], "tolerations");
            for effect in ["NoSchedule", "NoExecute"] {
                let any_key = json!({"effect": effect, "operator": "Exists"});
                let at = format!("{} {workload} {effect}", platform.name);
                assert!(tolerations.contains(&any_key), "{at}");
            }
        }
    }
}

#[test]
fn the_agents_pods_are_known_by_their_labels() {
    for platform in &PLATFORMS {
        let pods = pods(platform.name);
        assert_eq!(
            pods[0].0,
            match platform.name {
                "split" => "inpod-ztunnel-broker",
                REPAIR => "inpod-repair",
                _ => "inpod",
            }
        );
        for (workload, pod) in pods {
            let labels = &pod["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/name"], workload);
            assert_eq!(labels["istio.io/dataplane-mode"], "none");
            assert_eq!(labels["sidecar.istio.io/inject"], "false");
            // istiod's untaint controller considers a node with such a pod ready for ADDs.
            let gate = labels
                .get("k8s-app")
                .is_some_and(|app| app == "istio-cni-node");
            assert_eq!(gate, workload == "inpod", "{workload}");
        }
    }
}

#[test]
fn a_container_runs_its_component_and_knows_its_peers() {
    each(|platform, rights, container, pod| {
        let name = rights.container;
        let image = text(container, "/image");
        assert_eq!(
            image,
            format!(
                "registry.example/inpod/{name}:{}",
                env!("CARGO_PKG_VERSION")
            ),
            "{}",
            platform.name
        );
        let mut env = list(container, "env").iter();
        let peer = env
            .find(|it| it["name"] == "INPOD_PEER")
            .map(|it| it["value"].clone());
        // Services that answer another pod's service; repair has only calls that every process may make.
        let wanted = match (platform.name, name) {
            (_, REPAIR) => Some(json!("uid")),
            ("split", _) | (REPAIR, "pod-events") => Some(json!("cgroup:/..")),
            _ => None,
        };
        assert_eq!(peer, wanted, "{name}");
        assert_eq!(pod["spec"]["restartPolicy"], Value::Null);
    });
}

#[test]
fn the_job_that_makes_nodes_leave_is_nobody_on_the_node_and_no_manifest_of_the_agent_holds_it() {
    for platform in &PLATFORMS {
        assert!(
            of_kind(platform.name, &["Job"]).is_empty(),
            "{}",
            platform.name
        );
    }
    let jobs = of_kind("leave", &["Job"]);
    let annotations = &jobs[0]["metadata"]["annotations"];
    assert_eq!(annotations["helm.sh/hook"], "pre-delete");
    let spec = &jobs[0]["spec"]["template"]["spec"];
    let container = &spec["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(context["runAsNonRoot"], true);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(spec["hostPID"], Value::Null);
    // It runs before any pod has a network.
    assert_eq!(spec["hostNetwork"], true);
    let volumes = list(spec, "volumes");
    assert!(volumes.len() == 1 && volumes[0].get("projected").is_some());
    let arguments = words(&container["args"]);
    assert_eq!(arguments[0], "uninstall");
    assert!(arguments.contains(&"--namespace=inpod-system"));
}

#[test]
fn gke_has_a_quota_for_critical_pods_and_nobody_else() {
    for platform in &PLATFORMS {
        let quotas = of_kind(platform.name, &["ResourceQuota"]);
        assert_eq!(
            quotas.len(),
            usize::from(platform.name == "gke"),
            "{}",
            platform.name
        );
    }
}

/// `peer=cgroup:/..` according to deploy/docs/install.md, seen from a container with its own cgroup namespace.
#[test]
fn the_peer_of_split_is_any_process_but_those_of_the_container_itself() {
    let is_service = |path: &str| Cgroup::parse(&format!("0::{path}\n")).is_below("/..");
    let other_pod = "/../../kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-a.scope";
    for peer in [
        "/../cri-containerd-b.scope",
        other_pod,
        "/../../../../system.slice/ssh.service",
    ] {
        assert!(is_service(peer), "{peer}");
    }
    for peer in [
        "/",
        "/init.scope",
        "/kubepods.slice/kubepods-pod1.slice/cri-containerd-b.scope",
    ] {
        assert!(!is_service(peer), "{peer}");
    }
    // Other pods may not make host processes' calls.
    assert!(!Cgroup::parse(&format!("0::{other_pod}\n")).is_host(&[]));
}
