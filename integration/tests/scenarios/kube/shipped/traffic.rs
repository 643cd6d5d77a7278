//! Capture in both directions from the answer of the ADD on, and none of pods outside the mesh.

use integration::App;

use super::*;

/// Pods that start one after the other.
const PODS: usize = 10;

/// The source of probes that pods see (`probe_source_v4`).
const PROBE_SOURCE: &str = "169.254.7.127";

#[test]
fn the_first_connections_after_an_add_are_captured_in_both_directions() {
    let deployed = running();
    let [outsider] = start(&deployed, [Mesh::Outside]);
    let _outside = App::start(&outsider.pod.netns, PORT).unwrap();
    let mut last: Option<Living> = None;
    for _ in 0..PODS {
        let pods = deployed.sandboxes(&[Mesh::Inside]).unwrap();
        let _app = App::start(&pods[0].netns, PORT).unwrap();
        deployed.add(&pods[0]).unwrap();
        let (pod, peer) = (&pods[0], &outsider.pod);
        assert_path(&deployed, pod, peer, &[(pod, 15001)]);
        assert_path(&deployed, peer, pod, &[(pod, 15006)]);
        if let Some(last) = &last {
            let path = [(&last.pod, 15001), (pod, 15006)];
            assert_path(&deployed, &last.pod, pod, &path);
        }
        last = inhabited(&deployed, pods).next();
    }
    until_enrolled(&deployed, PODS);
}

#[test]
fn a_pod_outside_the_mesh_is_untouched_and_its_traffic_is_not_captured() {
    let deployed = running();
    let [inside, a, b] = start(&deployed, [Mesh::Inside, Mesh::Outside, Mesh::Outside]);
    let _apps = [&a, &b].map(|it| App::start(&it.pod.netns, PORT).unwrap());
    assert_path(&deployed, &a.pod, &b.pod, &[]);
    for living in [&a, &b] {
        assert_eq!(living.pod.traces().unwrap(), NOTHING);
        assert_eq!(living.pod.ruleset().unwrap(), "");
    }
    assert_ne!(inside.pod.traces().unwrap(), NOTHING);
    assert_eq!(deployed.node.api().claims().unwrap().len(), 1);
}

#[test]
fn a_probe_from_the_node_is_not_captured_and_has_the_address_that_istio_gives_it() {
    let deployed = running();
    let [living] = start(&deployed, [Mesh::Inside]);
    let _app = App::start(&living.pod.netns, PORT).unwrap();
    let to = SocketAddr::new(living.pod.v4.into(), PORT);
    let found = follow(&deployed, deployed.node.netns(), to);
    assert_eq!(found, (Vec::new(), PROBE_SOURCE.to_owned()));
    // At a port without a probe, the kubelet's user is a client like any other.
    let unprobed = PORT + 1;
    let _other = App::start(&living.pod.netns, unprobed).unwrap();
    let to = SocketAddr::new(living.pod.v4.into(), unprobed);
    let (captured, source) = follow(&deployed, deployed.node.netns(), to);
    let listeners: Vec<_> = captured.iter().map(|(_, listener)| *listener).collect();
    assert_eq!((listeners, source.as_str()), (vec![15006], PROBE_SOURCE));
}
