/// The class of callers that may call an RPC. The RPC's comment in the proto file also states the class; a test
/// compares both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Host processes and inpod's services, for calls that change nothing.
    Read,
    /// Host processes, such as the runtime's plugin, for the CNI verbs.
    Cni,
    /// Host processes of operators, audited, for actions that change no pod.
    Operator,
    /// Only the authenticated service, for calls that change something or open a path.
    Service,
}

/// Returns the class of an RPC by its path (`/package.Service/Method`). A path without a class may not be called.
/// Health and reflection are [`Class::Read`].
pub fn class_of(path: &str) -> Option<Class> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    match service {
        "inpod.podevents.v1.PodEventsService" => pod_events(method),
        "inpod.netconfig.v1.NetconfigService" => netconfig(method),
        "inpod.ztunnelbroker.v1.ZtunnelBrokerService" => ztunnel_broker(method),
        "inpod.log.v1.LogService" => log(method),
        "grpc.health.v1.Health" => matches!(method, "Check" | "Watch").then_some(Class::Read),
        "grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection" => {
            (method == "ServerReflectionInfo").then_some(Class::Read)
        }
        _ => None,
    }
}

/// Returns the maximum size of an RPC's request with its five bytes of framing, or `None` if the RPC receives a stream
/// of requests.
pub fn max_request_bytes(path: &str) -> Option<usize> {
    match path {
        // These requests list pods of the node or Services of the cluster.
        "/inpod.podevents.v1.PodEventsService/CollectGarbage"
        | "/inpod.podevents.v1.PodEventsService/ListBinds"
        | "/inpod.ztunnelbroker.v1.ZtunnelBrokerService/SetWorkloads" => Some(4 << 20),
        _ if path.starts_with("/grpc.reflection.") => None,
        _ => Some(64 << 10),
    }
}

fn pod_events(method: &str) -> Option<Class> {
    match method {
        "AddPod" | "CheckPod" | "DeletePod" | "CollectGarbage" => Some(Class::Cni),
        "GetStatus" | "ExplainPod" | "ListPods" | "WatchEnrollments" | "ListBinds" => {
            Some(Class::Read)
        }
        "Resync" => Some(Class::Operator),
        _ => None,
    }
}

fn netconfig(method: &str) -> Option<Class> {
    match method {
        "ClaimNetns" | "ReleaseNetns" | "FindNetns" | "ApplyRules" | "RemoveRules"
        | "LeaveNode" => Some(Class::Service),
        // The handler itself requires Class::Service if the request names a path instead of a claimed sandbox.
        "InspectNetns" | "ListListeners" => Some(Class::Read),
        "ListClaims" | "PlanRules" | "VerifyRules" | "WatchDrift" => Some(Class::Read),
        "SelfTest" => Some(Class::Operator),
        _ => None,
    }
}

fn ztunnel_broker(method: &str) -> Option<Class> {
    match method {
        "SetWorkloads" | "AddWorkload" | "RemoveWorkload" | "SetZtunnels" => Some(Class::Service),
        "ListWorkloads" | "WatchSessions" => Some(Class::Read),
        _ => None,
    }
}

fn log(method: &str) -> Option<Class> {
    match method {
        "GetLogLevels" => Some(Class::Read),
        "SetLogLevel" => Some(Class::Operator),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::{FileDescriptorProto, FileDescriptorSet};

    use super::*;

    /// Returns the path and the comment of every call. In a descriptor, `[6, s, 2, m]` is method `m` of service `s`.
    fn calls(file: &FileDescriptorProto) -> Vec<(String, String)> {
        let comment = |path: &[i32]| {
            let info = file.source_code_info.as_ref().unwrap();
            let location = info.location.iter().find(|location| location.path == path);
            location.unwrap().leading_comments().to_owned()
        };
        let mut found = Vec::new();
        for (s, service) in (0..).zip(&file.service) {
            for (m, method) in (0..).zip(&service.method) {
                let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                found.push((path, comment(&[6, s, 2, m])));
            }
        }
        found
    }

    #[test]
    fn every_call_states_the_class_that_the_servers_enforce() {
        let set = FileDescriptorSet::decode(crate::DESCRIPTORS).unwrap();
        let calls: Vec<_> = set.file.iter().flat_map(calls).collect();
        assert_eq!(calls.len(), 31, "{calls:?}");
        for (path, comment) in calls {
            let stated = match comment.split_once("Class: ").unwrap().1 {
                rest if rest.starts_with("service for a path, read for") => Class::Read,
                rest if rest.starts_with("service.") => Class::Service,
                rest if rest.starts_with("operator.") => Class::Operator,
                rest if rest.starts_with("cni.") => Class::Cni,
                rest if rest.starts_with("read.") => Class::Read,
                rest => panic!("{path}: no known class in {rest:?}"),
            };
            assert_eq!(class_of(&path), Some(stated), "{path}");
        }
    }

    #[test]
    fn every_call_states_whether_it_can_be_repeated() {
        let set = FileDescriptorSet::decode(crate::DESCRIPTORS).unwrap();
        for (path, comment) in set.file.iter().flat_map(calls) {
            assert!(comment.contains("Repeatable"), "{path}");
        }
    }

    #[test]
    fn an_undeclared_call_has_no_class() {
        assert_eq!(
            class_of("/inpod.netconfig.v1.NetconfigService/Format"),
            None
        );
        assert_eq!(class_of("/evil.Service/ClaimNetns"), None);
        assert_eq!(class_of(""), None);
    }
}
