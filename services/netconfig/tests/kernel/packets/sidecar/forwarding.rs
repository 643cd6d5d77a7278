//! Traffic passes a forwarding proxy exactly once, without a loop.

use std::io::{BufRead as _, BufReader, Write as _};

use netconfig::rules::Sidecar;

use super::{
    mesh::{APPLICATION, EVERYWHERE, Mesh, PRIVILEGED, PROXY, returning},
    process::Role,
    settings,
};
use crate::packets::{
    probe::{Dial, Owner, TIMEOUT},
    world::{Place, Pod, outside, pod},
};

/// Reads each listener's report on the path, in order; then exchanges an echo.
fn way(mesh: &Mesh, dial: &Dial) -> Vec<String> {
    let mut way = Vec::new();
    let opened = dial.connect(&mesh.world, mesh.world.port(), TIMEOUT);
    let Ok(stream) = opened else {
        return vec![format!("{:?}", opened.unwrap_err().kind())];
    };
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        match stream.read_line(&mut line) {
            Err(error) => way.push(format!("{:?}", error.kind())),
            Ok(0) => way.push("nothing".to_owned()),
            Ok(_) if line.starts_with("through ") => {
                way.push(line.trim_end().to_owned());
                continue;
            }
            Ok(_) => way.push(line.trim_end().to_owned()),
        }
        break;
    }
    stream.get_mut().write_all(b"hello\n").unwrap();
    let mut heard = String::new();
    drop(stream.read_line(&mut heard));
    assert!(heard.ends_with("hello\n"), "{dial:?}: {way:?}: {heard:?}");
    way
}

fn everything_goes_through_once(settings: &Sidecar, proxy: Owner, role: Role) {
    let mesh = Mesh::new(Pod::Dual, proxy, role);
    mesh.apply(settings);
    for family in mesh.world.families() {
        let (pod, outside) = (pod(*family), outside(*family));
        let lines_of = |text: String| -> Vec<String> { text.lines().map(str::to_owned).collect() };
        let at = |address, port| std::net::SocketAddr::new(address, port);
        let (own, out) = (at(pod, EVERYWHERE), at(outside, EVERYWHERE));
        let keeps = role == Role::ForwardsInTheClientsName;
        let caller = |client| if keeps { client } else { returning(*family) };
        let (from_outside, from_pod) = (caller(outside), caller(pod));
        let application = format!("application {EVERYWHERE}");
        let arrives = Dial::tcp(Place::Outside, pod, EVERYWHERE);
        assert_eq!(
            way(&mesh, &arrives),
            lines_of(format!(
                "through 15006 {outside} {own}\n{application} {from_outside} {own}"
            )),
            "{family}"
        );
        let leaves = Dial::tcp(Place::Pod, outside, EVERYWHERE).of(APPLICATION);
        assert_eq!(
            way(&mesh, &leaves),
            lines_of(format!(
                "through 15001 {pod} {out}\noutside {EVERYWHERE} {pod} {out}"
            )),
            "{family}"
        );
        // The proxy to itself, by the pod's address.
        let itself = Dial::tcp(Place::Pod, pod, EVERYWHERE).of(proxy);
        assert_eq!(
            way(&mesh, &itself),
            lines_of(format!(
                "through 15006 {pod} {own}\n{application} {from_pod} {own}"
            )),
            "{family}"
        );
        // The application to itself, and traffic that has passed the proxy.
        let itself = Dial::tcp(Place::Pod, pod, EVERYWHERE).of(APPLICATION);
        let direct = lines_of(format!("{application} {pod} {own}"));
        assert_eq!(way(&mesh, &itself), direct, "{family}");
        let back = returning(*family);
        let returned = Dial::tcp(Place::Pod, pod, EVERYWHERE).of(proxy).from(back);
        let direct = lines_of(format!("{application} {back} {own}"));
        assert_eq!(way(&mesh, &returned), direct, "{family}");
    }
}

#[test]
fn everything_goes_through_the_proxy_once_and_the_application_is_called_from_127_0_0_6() {
    everything_goes_through_once(&settings::basic(), PROXY, Role::Forwards);
    everything_goes_through_once(&settings::rich(), PROXY, Role::Forwards);
}

#[test]
fn by_tproxy_everything_goes_through_once_and_the_application_sees_the_clients_address() {
    let settings = settings::by_tproxy(settings::basic());
    everything_goes_through_once(&settings, PRIVILEGED, Role::ForwardsInTheClientsName);
}

/// Negative control: without the proxy's exemption, traffic returns until the proxy detects a loop.
#[test]
fn without_the_rule_for_its_user_the_proxy_calls_itself_for_ever() {
    let mesh = Mesh::new(Pod::Dual, PROXY, Role::Forwards);
    mesh.apply(&settings::basic());
    for table_and_text in ["meta skuid 1337 counter", "meta skgid 1337 counter"] {
        let listed = mesh.world.pod.command(
            "nft",
            &["-a", "list", "chain", "inet", "inpod-nat", "output"],
        );
        let line = listed
            .lines()
            .find(|line| line.trim().starts_with(table_and_text));
        let handle = line.unwrap().rsplit(' ').next().unwrap();
        let script = format!("delete rule inet inpod-nat output handle {handle}");
        mesh.world.pod.nft(&script);
    }
    let outside = outside(netconfig::Family::V4);
    let leaves = Dial::tcp(Place::Pod, outside, EVERYWHERE).of(APPLICATION);
    let opened = leaves
        .connect(&mesh.world, mesh.world.port(), TIMEOUT)
        .unwrap();
    let heard: Vec<_> = BufReader::new(opened)
        .lines()
        .map_while(Result::ok)
        .collect();
    assert!(heard.iter().any(|line| line == "a loop"), "{heard:?}");
}
