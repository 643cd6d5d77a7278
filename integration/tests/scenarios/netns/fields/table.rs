//! Well-formed requests of every call with fields.

use inpod_proto::{
    DESCRIPTORS, netconfig::v1 as netconfig, podevents::v1 as pod_events, types::v1 as types,
    ztunnelbroker::v1 as broker,
};
use integration::{Node, Pod};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};

use crate::netns::fields::ask::Good;

fn sandbox(pod: &Pod) -> types::SandboxRef {
    types::SandboxRef {
        network_name: "podnet".into(),
        container_id: pod.container_id.clone(),
        ifname: "eth0".into(),
    }
}

fn selector(pod: &Pod) -> types::PodSelector {
    types::PodSelector {
        namespace: pod.spec.namespace.clone(),
        name: pod.spec.name.clone(),
        uid: String::new(),
    }
}

/// One in the mesh, one outside.
struct Parts {
    pool: DescriptorPool,
    own: Option<types::SandboxRef>,
    inside: Option<types::PodSelector>,
    pod: Option<types::PodRef>,
    new: Option<types::SandboxRef>,
    fresh: Option<types::PodSelector>,
    netns: types::NetnsRef,
    addresses: Vec<String>,
    workload: Option<broker::Workload>,
    instance_id: String,
}

impl Parts {
    fn of(node: &Node, inside: &Pod, fresh: &Pod) -> Self {
        let id = fresh.netns.id();
        let listed = node.api().workloads().unwrap();
        Self {
            pool: DescriptorPool::decode(DESCRIPTORS).unwrap(),
            own: Some(sandbox(inside)),
            inside: Some(selector(inside)),
            pod: Some(types::PodRef {
                namespace: inside.spec.namespace.clone(),
                name: inside.spec.name.clone(),
                uid: inside.spec.uid.clone(),
            }),
            new: Some(sandbox(fresh)),
            fresh: Some(selector(fresh)),
            netns: types::NetnsRef {
                path: fresh.path().display().to_string(),
                device: Some(id.device),
                inode: Some(id.inode),
                cookie: Some(id.cookie),
            },
            addresses: vec![fresh.v4.to_string()],
            workload: listed.workloads.first().unwrap().workload.clone(),
            instance_id: listed.instance_id,
        }
    }

    fn call(&self, component: &'static str, method: &'static str, message: &impl Message) -> Good {
        let package = component.replace('-', "");
        let name = format!("inpod.{package}.v1.{method}Request");
        let descriptor = self.pool.get_message_by_name(&name).unwrap();
        let bytes = message.encode_to_vec();
        Good {
            component,
            method,
            message: DynamicMessage::decode(descriptor, bytes.as_slice()).unwrap(),
        }
    }

    fn pod_events(&self) -> Vec<Good> {
        let call = "pod-events";
        let add = pod_events::AddPodRequest {
            sandbox: self.new.clone(),
            pod: self.fresh.clone(),
            netns: Some(self.netns.clone()),
            addresses: self.addresses.clone(),
        };
        let check = pod_events::CheckPodRequest {
            sandbox: self.own.clone(),
        };
        let delete = pod_events::DeletePodRequest {
            sandbox: self.own.clone(),
            pod: None,
        };
        let container_id = self.own.clone().unwrap().container_id;
        let ifname = "eth0".to_owned();
        let collect = pod_events::CollectGarbageRequest {
            network_name: "podnet".into(),
            valid_attachments: vec![pod_events::Attachment {
                container_id,
                ifname,
            }],
        };
        let explain = pod_events::ExplainPodRequest {
            pod: self.inside.clone(),
        };
        let list = pod_events::ListPodsRequest {
            pod: self.inside.clone(),
            ..Default::default()
        };
        let watch = pod_events::WatchEnrollmentsRequest {
            pod: self.inside.clone(),
        };
        let binds = pod_events::ListBindsRequest {
            pod: self.inside.clone(),
            labels: vec!["app=inside".to_owned()],
            service_ports: vec![pod_events::ServicePort {
                pod: self.pod.clone(),
                service: "web".to_owned(),
                protocol: pod_events::PortProtocol::Tcp.into(),
                port: 8080,
            }],
            ..Default::default()
        };
        let resync = pod_events::ResyncRequest {
            pod: self.inside.clone(),
        };
        vec![
            self.call(call, "AddPod", &add),
            self.call(call, "CheckPod", &check),
            self.call(call, "DeletePod", &delete),
            self.call(call, "CollectGarbage", &collect),
            self.call(call, "ExplainPod", &explain),
            self.call(call, "ListPods", &list),
            self.call(call, "WatchEnrollments", &watch),
            self.call(call, "ListBinds", &binds),
            self.call(call, "Resync", &resync),
        ]
    }

    fn netconfig(&self) -> Vec<Good> {
        let call = "netconfig";
        let ambient = netconfig::AmbientRedirection {
            reroute_virtual_interfaces: vec!["vm0".to_owned()],
            exclusions: Some(netconfig::Exclusions {
                outbound_cidrs: vec!["10.96.0.0/12".to_owned()],
                inbound_cidrs: vec!["fd00::/8".to_owned()],
                ..Default::default()
            }),
            ..Default::default()
        };
        let redirection = Some(netconfig::Redirection {
            mode: Some(netconfig::redirection::Mode::Ambient(ambient)),
        });
        let sandbox = || self.own.clone();
        let claim = netconfig::ClaimNetnsRequest {
            sandbox: self.new.clone(),
            netns: Some(self.netns.clone()),
            addresses: self.addresses.clone(),
            probe_exemption: netconfig::ProbeExemption::On.into(),
        };
        let release = netconfig::ReleaseNetnsRequest { sandbox: sandbox() };
        let apply = netconfig::ApplyRulesRequest {
            sandbox: sandbox(),
            redirection: redirection.clone(),
            probe_addresses: self.addresses.clone(),
            require_listeners: false,
        };
        let plan = netconfig::PlanRulesRequest {
            sandbox: sandbox(),
            redirection: redirection.clone(),
        };
        let find = netconfig::FindNetnsRequest {
            pod_uid: "11111111-2222-3333-4444-555555555555".to_owned(),
            addresses: self.addresses.clone(),
        };
        let target = netconfig::list_listeners_request::Target::Netns(self.netns.clone());
        let listeners = netconfig::ListListenersRequest {
            target: Some(target),
        };
        let remove = netconfig::RemoveRulesRequest {
            sandbox: sandbox(),
            phase: netconfig::RemovePhase::Drain.into(),
        };
        let verify = netconfig::VerifyRulesRequest {
            sandbox: sandbox(),
            redirection,
        };
        let target = netconfig::inspect_netns_request::Target::Netns(self.netns.clone());
        vec![
            self.call(call, "ClaimNetns", &claim),
            self.call(call, "ReleaseNetns", &release),
            self.call(call, "ApplyRules", &apply),
            self.call(call, "PlanRules", &plan),
            self.call(call, "FindNetns", &find),
            self.call(call, "ListListeners", &listeners),
            self.call(call, "RemoveRules", &remove),
            self.call(call, "VerifyRules", &verify),
            self.call(call, "InspectNetns", &inspect(target)),
        ]
    }

    fn broker(&self) -> Vec<Good> {
        let call = "ztunnel-broker";
        let set = broker::SetWorkloadsRequest {
            instance_id: self.instance_id.clone(),
            revision: u64::MAX / 2,
            workloads: self.workload.clone().into_iter().collect(),
        };
        let add = broker::AddWorkloadRequest {
            instance_id: self.instance_id.clone(),
            workload: self.workload.clone(),
        };
        let remove = broker::RemoveWorkloadRequest {
            instance_id: self.instance_id.clone(),
            sandbox: self.own.clone(),
            revision: u64::MAX / 2,
        };
        vec![
            self.call(call, "SetWorkloads", &set),
            self.call(call, "AddWorkload", &add),
            self.call(call, "RemoveWorkload", &remove),
        ]
    }
}

/// Returns a request for a pod in the mesh and one outside.
pub(crate) fn table(node: &Node, inside: &Pod, fresh: &Pod) -> Vec<Good> {
    let parts = Parts::of(node, inside, fresh);
    [parts.pod_events(), parts.netconfig(), parts.broker()].concat()
}

fn inspect(target: netconfig::inspect_netns_request::Target) -> netconfig::InspectNetnsRequest {
    netconfig::InspectNetnsRequest {
        target: Some(target),
        ..netconfig::InspectNetnsRequest::default()
    }
}
