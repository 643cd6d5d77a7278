//! Builders that default everything but the fact under test.

use std::collections::BTreeMap;

use workload::{NetnsRef, PodRef, Revision, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    pod::{Namespace, Pod},
    redirection::{Asks, Wishes},
};

pub(crate) fn pod(namespace: &str, name: &str) -> Pod {
    Pod {
        pod: PodRef {
            namespace: namespace.parse().unwrap(),
            name: name.parse().unwrap(),
            uid: format!("uid-of-{name}").parse().unwrap(),
        },
        service_account: "default".parse().unwrap(),
        node: None,
        labels: BTreeMap::new(),
        host_network: false,
        has_sidecar: false,
        terminal: false,
        runtime_uid: None,
        asks: Asks::default(),
        addresses: Vec::new(),
        redirection: None,
        is_ready: false,
        is_terminating: false,
    }
}

pub(crate) fn namespace(name: &str) -> Namespace {
    Namespace::bare(name.parse().unwrap())
}

pub(crate) fn sandbox(container_id: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: container_id.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

pub(crate) fn record(container_id: &str) -> Record {
    Record {
        sandbox: sandbox(container_id),
        pod: pod("shop", "web").pod,
        service_account: "default".parse().unwrap(),
        netns: NetnsRef::at("/run/netns/web"),
        netns_id: None,
        addresses: vec!["10.0.0.1".parse().unwrap()],
        revision: Revision(1),
        intent: Intent::Out,
        runtime_uid: None,
        let_through: false,
        wishes: Wishes::default(),
    }
}
