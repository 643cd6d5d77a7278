//! Pods with a sidecar under containerd and runc: no capabilities, and traffic through the proxy.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, ensure};
use inpod_proto::{
    podevents::v1::{ExplainPodResponse, PodState},
    types::v1::{Enrollment, Reason},
};
use inpod_types::keys;
use integration::{Pod, Spec, TIMEOUT, eventually, kubernetes};

use crate::{
    PORT, image,
    kubelet::{Resident, Role, Shape, import, seen},
    runtime::Runtime,
    sandboxes::NOTHING,
    sidecar_missed::fails,
    unprivileged::assert_unprivileged,
};

/// A proxy's source addresses towards its own application (services/docs/facts/istio-sidecar.md, 7.2).
const PROXY_SOURCES: [&str; 2] = ["127.0.0.6", "::6"];

/// Source, destination and outcome.
type Connection<'a> = (IpAddr, SocketAddr, &'a str);

/// Waits until exactly its rules redirect a pod.
pub(crate) fn until_redirected(runtime: &Runtime, pod: &Pod) -> ExplainPodResponse {
    let known = eventually("it is redirected to its sidecar", TIMEOUT, || {
        let known = runtime.node.explain(&pod.spec)?;
        ensure!(known.state() == PodState::Enrolled, "{known:?}");
        let rules = known.rules.as_ref().context("no rules reported")?;
        ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
        anyhow::Ok(known)
    });
    let known = known.unwrap();
    assert_eq!(known.desired(), Enrollment::Sidecar);
    assert_eq!(known.reason(), Reason::SidecarInjected);
    known
}

/// The pod's proxy must log exactly these connections during `act`.
fn with_logged<T>(
    resident: &Resident<'_>,
    wanted: &[Connection<'_>],
    act: impl FnOnce() -> T,
) -> T {
    let before = resident.connections().unwrap().len();
    let done = act();
    let wanted: Vec<_> = wanted
        .iter()
        .map(|(from, to, outcome)| (*from, *to, (*outcome).to_owned()))
        .collect();
    // The runtime logs output with a delay.
    eventually("its proxy tells of it", TIMEOUT, || {
        let reported = resident.connections()?.split_off(before);
        ensure!(reported == wanted, "{reported:?}, not {wanted:?}");
        anyhow::Ok(())
    })
    .unwrap();
    done
}

fn asked(from: &Pod, to: SocketAddr) -> IpAddr {
    let (_, body) = kubernetes::ask(&from.netns, to, image::WHO).unwrap();
    seen(&body).unwrap()
}

/// Both directions and families pass the proxy with original destinations.
pub(crate) fn passes_its_proxy(inside: &Resident<'_>, outside: &Resident<'_>) {
    let families = inside
        .pod
        .addresses()
        .into_iter()
        .zip(outside.pod.addresses());
    for ((own, other), mark) in families.zip(PROXY_SOURCES) {
        let [here, there] = [own, other].map(|ip| SocketAddr::new(ip, PORT));
        let comes = (other, here, "forwarded");
        let source = with_logged(inside, &[comes], || asked(&outside.pod, here));
        assert_eq!(source, mark.parse::<IpAddr>().unwrap());
        let goes = (own, there, "forwarded");
        let source = with_logged(inside, &[goes], || inside.ask(there).unwrap());
        assert_eq!(source, own);
    }
    assert_eq!(inside.connections().unwrap().len(), 2 * PROXY_SOURCES.len());
}

pub(crate) fn outsider(runtime: &Runtime) -> Resident<'_> {
    let spec = Shape::Alone.spec("outsider", 0xff);
    Resident::running(runtime, Shape::Alone, spec).unwrap()
}

pub(crate) fn end(runtime: &Runtime, residents: &[&Resident<'_>]) {
    for resident in residents {
        resident.end().unwrap();
    }
    runtime.until_empty().unwrap();
}

fn node() -> Runtime {
    let runtime = Runtime::running().unwrap();
    import(&runtime);
    runtime
}

fn starts<'a>(runtime: &'a Runtime, shape: Shape, number: u8) -> Resident<'a> {
    let spec = shape.spec("web", number);
    let web = Resident::running(runtime, shape, spec).unwrap();
    until_redirected(runtime, &web.pod);
    assert_eq!(web.started(), [Role::Validation, Role::Proxy, Role::App]);
    assert_unprivileged(&web);
    web
}

#[test]
fn a_pod_with_a_plain_sidecar_starts_without_a_right_and_its_traffic_passes_the_proxy() {
    let runtime = node();
    let outsider = outsider(&runtime);
    let web = starts(&runtime, Shape::Plain, 1);
    passes_its_proxy(&web, &outsider);
    end(&runtime, &[&web, &outsider]);
}

#[test]
fn a_pod_with_a_native_sidecar_does_so_whether_the_proxy_is_before_the_validation_or_after() {
    let runtime = node();
    let outsider = outsider(&runtime);
    for (number, shape) in [Shape::Native, Shape::NativeFirst].into_iter().enumerate() {
        let web = starts(&runtime, shape, u8::try_from(number).unwrap());
        passes_its_proxy(&web, &outsider);
        web.end().unwrap();
    }
    end(&runtime, &[&outsider]);
}

#[test]
fn the_same_pod_without_redirection_stays_in_init_and_nothing_would_pass_its_proxy() {
    let runtime = node();
    let outsider = outsider(&runtime);
    let spec = Shape::Plain.spec("web", 1);
    let spec = spec.label(keys::SIDECAR_INJECT, "false");
    let mut web = Resident::new(&runtime, Shape::Plain, spec).unwrap();
    fails(&mut web);
    let known = runtime.node.explain(&web.pod.spec).unwrap();
    assert_eq!(known.reason(), Reason::HasSidecar);
    assert_eq!(web.pod.traces().unwrap(), NOTHING);
    for role in [Role::Proxy, Role::App] {
        web.start(role).unwrap();
        web.settled(role).unwrap();
    }
    let to = SocketAddr::new(web.pod.v4.into(), PORT);
    assert_eq!(asked(&outsider.pod, to), outsider.pod.v4);
    let to = SocketAddr::new(outsider.pod.v4.into(), PORT);
    assert_eq!(web.ask(to).unwrap(), web.pod.v4);
    // The proxy logs in order: a connection redirected by another rule would be first.
    let own = SocketAddr::new(web.pod.v4.into(), 9999);
    let rule = "add table ip lead; add chain ip lead prerouting { type nat hook prerouting priority -100; }; \
                add rule ip lead prerouting tcp dport 9999 redirect to :15006";
    web.pod.exec(&["nft", rule]).unwrap();
    let reported = [(outsider.pod.v4.into(), own, "refused")];
    with_logged(&web, &reported, || {
        integration::connect(&outsider.pod.netns, own).unwrap()
    });
    assert_eq!(web.connections().unwrap().len(), reported.len());
    end(&runtime, &[&web, &outsider]);
}

struct Place<'a> {
    sidecar: &'a Resident<'a>,
    ambient: &'a Resident<'a>,
}

fn is(one: &Resident<'_>, other: &Resident<'_>) -> bool {
    one.pod.spec.uid == other.pod.spec.uid
}

impl Place<'_> {
    /// Returns the proxy's log of a connection that it sends or accepts.
    fn proxy(
        &self,
        ends: [&Resident<'_>; 2],
        source: IpAddr,
        to: SocketAddr,
    ) -> Vec<Connection<'_>> {
        let own = ends.into_iter().filter(|end| is(end, self.sidecar));
        own.map(|_| (source, to, "forwarded")).collect()
    }

    fn ztunnel(&self, ends: [&Resident<'_>; 2]) -> Vec<(String, u64)> {
        let ports = ends.into_iter().zip([15001, 15006]);
        let own = ports.filter(|(end, _)| is(end, self.ambient));
        own.map(|(end, port)| (end.pod.spec.uid.clone(), port))
            .collect()
    }

    fn assert(&self, from: &Resident<'_>, to: &Resident<'_>) {
        let (node, ends) = (&self.sidecar.runtime.node, [from, to]);
        let what = format!("{} asks {}", from.pod.spec.name, to.pod.spec.name);
        let families = from.pod.addresses().into_iter().zip(to.pod.addresses());
        for ((own, other), mark) in families.zip(PROXY_SOURCES) {
            let target = SocketAddr::new(other, PORT);
            let before = node.accesses().unwrap().len();
            let reported = self.proxy(ends, own, target);
            let source = with_logged(self.sidecar, &reported, || from.ask(target).unwrap());
            let expected = if is(to, self.sidecar) {
                mark.parse().unwrap()
            } else {
                own
            };
            assert_eq!(source, expected, "{what}");
            let accesses = node.accesses().unwrap().split_off(before);
            let taken = accesses.into_iter().filter(|it| it.event == "accepted");
            let taken: Vec<_> = taken.map(|it| (it.uid, it.listener)).collect();
            assert_eq!(taken, self.ztunnel(ends), "{what}");
        }
    }
}

#[test]
fn ambient_pods_pods_with_a_sidecar_and_others_live_on_one_node_and_each_traffic_takes_its_own_way()
{
    let runtime = node();
    let outsider = outsider(&runtime);
    let sidecar = starts(&runtime, Shape::Plain, 1);
    let spec: Spec = Shape::Alone.spec("ambient", 2).ambient();
    let ambient = Resident::running(&runtime, Shape::Alone, spec).unwrap();
    runtime.node.until_whole(&ambient.pod.spec).unwrap();
    let place = Place {
        sidecar: &sidecar,
        ambient: &ambient,
    };
    let all = [&sidecar, &ambient, &outsider];
    for from in all {
        for to in all {
            if !is(from, to) {
                place.assert(from, to);
            }
        }
    }
    // A ztunnel knows its own pods only.
    let state = runtime.node.ztunnel_state().unwrap().to_string();
    assert!(state.contains(&ambient.pod.spec.uid), "{state}");
    assert!(!state.contains(&sidecar.pod.spec.uid), "{state}");
    assert_eq!(runtime.node.api().claims().unwrap().len(), 2);
    assert_eq!(outsider.pod.traces().unwrap(), NOTHING);
    end(&runtime, &all);
}
