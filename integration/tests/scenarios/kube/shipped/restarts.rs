//! A restart of a service loses no connection and no rule, and ADDs work after it.

use crate::common::flows::Flow;
use integration::{App, SERVICES};
use nix::sys::signal::Signal;

use super::*;

#[test]
fn a_restart_of_any_service_loses_no_connection_and_no_rule_and_pods_start_after_it() {
    let deployed = running();
    let [web, outsider] = start(&deployed, [Mesh::Inside, Mesh::Outside]);
    let _apps = [&web, &outsider].map(|it| App::start(&it.pod.netns, PORT).unwrap());
    let (pod, outsider) = (&web.pod, &outsider.pod);
    let flows = [(pod, outsider), (outsider, pod)].map(|(from, to)| {
        let to = SocketAddr::new(to.v4.into(), PORT);
        Flow::open(from, to).unwrap()
    });
    let wanted = rules(pod);
    let holds = || {
        assert_eq!(rules(pod), wanted);
        assert_path(&deployed, pod, outsider, &[(pod, 15001)]);
        assert_path(&deployed, outsider, pod, &[(pod, 15006)]);
        for flow in &flows {
            flow.goes_on().unwrap();
        }
    };
    let mut later = Vec::new();
    for service in SERVICES {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            deployed.node.stop(service, signal).unwrap();
            holds();
            deployed.start_service(service).unwrap();
            holds();
            // Not before it is ready: a kubelet does not wait for that either.
            later.extend(start_patiently(&deployed));
            let new = &later.last().unwrap().pod;
            assert_path(&deployed, new, outsider, &[(new, 15001)]);
            deployed.node.ready().unwrap();
            holds();
        }
    }
    until_enrolled(&deployed, 1 + later.len());
    for living in &later {
        deployed.node.until_whole(&living.pod.spec).unwrap();
    }
}

/// Starts a pod; repeats an ADD that is answered with "try again later" like a kubelet.
fn start_patiently(deployed: &DeployedNode) -> Option<Living> {
    let pods = deployed.sandboxes(&[Mesh::Inside]).unwrap();
    let add = deployed.call(integration::Call::add, &pods[0]).unwrap();
    eventually("the ADD succeeds", TIMEOUT, || {
        let outcome = add.run()?;
        let again = outcome.code == 0 || outcome.refusal()?.0 == 11;
        assert!(again, "{outcome:?}");
        ensure!(outcome.code == 0, "{outcome:?}");
        anyhow::Ok(())
    })
    .unwrap();
    inhabited(deployed, pods).next()
}
