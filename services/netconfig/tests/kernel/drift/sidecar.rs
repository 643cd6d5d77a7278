//! Changes of a sidecar's redirection by other processes.

use inpod_proto::netconfig::v1::{
    ApplyRulesRequest, InboundCapture, NetworkSelection, PortSelection, Redirection,
    SidecarRedirection, redirection::Mode,
};

use crate::drift::{start, watcher::Watcher};
use crate::harness::{pod_netns, wire};

fn by_tproxy() -> Redirection {
    let sidecar = SidecarRedirection {
        inbound_capture: InboundCapture::Tproxy.into(),
        proxy_uids: vec![1337],
        proxy_gids: vec![1337],
        inbound_ports: Some(PortSelection {
            all: true,
            ports: Vec::new(),
        }),
        outbound_networks: Some(NetworkSelection {
            all: true,
            networks: Vec::new(),
        }),
        ..SidecarRedirection::default()
    };
    Redirection {
        mode: Some(Mode::Sidecar(sidecar)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_a_route_an_ip_rule_and_the_address_that_go_are_told() {
    let mut netconfig = start(&[]).await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let (_, watcher) = Watcher::open(&mut netconfig).await;
    let mut reported = 0;
    for what in [
        "-6 addr del ::6/128 dev lo",
        "-4 rule del pref 500",
        "-6 route del local default dev lo table 10501",
        "nft",
    ] {
        let request = ApplyRulesRequest {
            sandbox: wire("c1"),
            redirection: Some(by_tproxy()),
            probe_addresses: Vec::new(),
            require_listeners: false,
        };
        let applied = netconfig.client.apply_rules(request).await.unwrap();
        assert!(applied.into_inner().changed, "{what}");
        reported += 1;
        assert!(
            watcher.wait_for_states("c1", reported).await.intact,
            "{what}"
        );
        if what == "nft" {
            fresh.nft("flush chain inet inpod-nat output");
        } else {
            fresh.ip(what);
        }
        reported += 1;
        assert!(
            !watcher.wait_for_states("c1", reported).await.intact,
            "{what}"
        );
    }
}
