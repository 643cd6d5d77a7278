//! Without any rule of a sidecar's redirection, a check fails.

use std::collections::BTreeSet;

use netconfig::{
    Family,
    rules::{InboundCapture, Ipv6, Redirection, Selection, Sidecar},
};

use super::{
    checks::checks,
    invalid,
    matrix::admitted_past_a_nontransparent_proxy,
    mesh::{Mesh, PRIVILEGED, PROXY},
    process::Role,
    settings::{self, UNHEARD},
};
use crate::packets::{
    matrix::{MAX_PODS, all, run_all, run_all_once},
    mutation::{Part, rules},
    probe::{Dial, Owner, SILENCE, TIMEOUT, at_once},
    stand_in::By,
    world::{Place, Pod, outside},
};

/// Exactly one rule matches each of the proxy's owners.
const PROXIES: [Owner; 3] = [
    Owner {
        user: 1337,
        group: 1000,
    },
    Owner {
        user: 1338,
        group: 1000,
    },
    PRIVILEGED,
];

/// Scenarios with the most rules first. Unless all are tried, the others contribute only new rules.
#[test]
fn every_rule_of_a_sidecar_is_needed_by_a_check() {
    let mut all_settings = settings::all();
    all_settings.sort_by_key(|(name, _)| !name.starts_with("rich"));
    let mut tried = BTreeSet::new();
    let mut work = Vec::new();
    for (name, settings) in all_settings {
        let mut chosen = parts(&settings);
        chosen.retain(|part| tried.insert(part.what()) || all());
        let some = chosen.chunks(8);
        work.extend(some.map(|some| (name, settings.clone(), some.to_vec())));
    }
    let idle = at_once(MAX_PODS, &work, |(name, settings, chosen)| {
        let mut idle = chosen.clone();
        for proxy in PROXIES
            .into_iter()
            .filter(|proxy| is_proxy(*proxy, settings))
        {
            if !idle.is_empty() {
                idle = try_without(proxy, name, settings, &idle);
            }
        }
        let failed = idle.iter().map(|part| format!("{name}: {}", part.what()));
        failed.collect::<Vec<_>>()
    });
    assert_eq!(
        idle.concat(),
        [""; 0],
        "nothing fails where these are missing"
    );
}

fn is_proxy(proxy: Owner, settings: &Sidecar) -> bool {
    let has = |owners: &[netconfig::rules::Owner], number: u32| {
        owners.contains(&netconfig::rules::Owner::new(number).unwrap())
    };
    has(&settings.proxy_users, proxy.user) || has(&settings.proxy_groups, proxy.group)
}

/// Returns parts for a pod with both families.
fn parts(settings: &Sidecar) -> Vec<Part> {
    let mut parts = rules(&Redirection::Sidecar(settings.clone()));
    let families: &[_] = if settings.ipv6 == Ipv6::Off {
        &[Family::V4]
    } else {
        parts.push(Part::Route("-6 addr del ::6/128 dev lo".to_owned()));
        &Family::ALL
    };
    let is_tproxied = settings.inbound_capture == InboundCapture::Tproxy
        && settings.inbound_ports != Selection::default();
    for family in families.iter().filter(|_| is_tproxied) {
        let number = if *family == Family::V4 { "-4" } else { "-6" };
        parts.push(Part::Route(format!("{number} rule del pref 500")));
        parts.push(Part::Route(format!(
            "{number} route del local default dev lo table 10501"
        )));
    }
    parts
}

fn try_without(proxy: Owner, name: &str, settings: &Sidecar, chosen: &[Part]) -> Vec<Part> {
    let mut mesh = Mesh::new(Pod::Dual, proxy, Role::Answers);
    let is_tproxied = settings.inbound_capture == InboundCapture::Tproxy;
    if is_tproxied {
        mesh.proxy.set_transparent(true);
    }
    mesh.apply(settings);
    let checks = checks(settings, mesh.world.families());
    assert_eq!(run_all(&mesh.world, &checks), [""; 0], "{name}, whole");
    let mut idle = Vec::new();
    for part in chosen {
        part.delete(&mesh.world);
        let mut missed = run_all_once(&mesh.world, &checks);
        if missed.is_empty() {
            missed.extend(others(&mut mesh, settings));
        }
        let what = part.what();
        println!("{name}: without {what}\n    {}", missed.join("\n    "));
        if missed.is_empty() {
            idle.push(part.clone());
        }
        assert!(mesh.apply(settings), "{what} was not missing");
    }
    assert_eq!(run_all(&mesh.world, &checks), [""; 0], "{name}, mended");
    idle
}

/// No connections: invalid packets, and those for which TPROXY finds no socket.
fn others(mesh: &mut Mesh, settings: &Sidecar) -> Vec<String> {
    let mut missed = Vec::new();
    for family in mesh.world.families() {
        if settings.drop_invalid && invalid::is_seen(&mesh.world, *family, SILENCE) {
            missed.push(format!("{family}: what belongs to no connection is let in"));
        }
    }
    if settings.inbound_capture == InboundCapture::Tproxy {
        let ports = match &settings.inbound_ports {
            Selection::All => vec![8080],
            Selection::These(_) => UNHEARD.to_vec(),
        };
        missed.extend(admitted_past_a_nontransparent_proxy(mesh, &ports));
        missed.extend(cut_off(mesh));
    }
    missed
}

/// Replies to the proxy's connections from a captured port are no inbound traffic.
fn cut_off(mesh: &Mesh) -> Vec<String> {
    let mut missed = Vec::new();
    for family in mesh.world.families() {
        for port in UNHEARD {
            let dial = Dial::tcp(Place::Pod, outside(*family), 8080).of(PROXY);
            let (_, found) = dial.open(&mesh.world, port, TIMEOUT);
            if found.by() != Some(By::Outside) {
                missed.push(format!("{family}: what is sent from port {port}: {found}"));
            }
        }
    }
    missed
}
