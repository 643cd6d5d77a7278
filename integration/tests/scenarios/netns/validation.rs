//! `validate` in network namespaces with and without sidecar rules, unprivileged as the proxy's user, like an init
//! container. nft writes the rules as in services/docs/facts/istio-sidecar.md, 4.8.

mod sandbox;

use std::time::Duration;

use anyhow::ensure;
use integration::{App, TIMEOUT, eventually, is_alone, not_run, run};

use sandbox::{Sandbox, V4, V6, proxy};

const DEADLINE: &[&str] = &["--timeout", "700ms"];

#[test]
fn each_family_that_is_redirected_is_proven_at_once() {
    for (addresses, families, reported) in [
        (
            &[V4][..],
            &["ip"][..],
            &["IPv4: a connection to 127.0.0.6:15002 arrived at port 15006"][..],
        ),
        (
            &[V6],
            &["ip6"],
            &["IPv6: a connection to [::6]:15002 arrived at port 15006"],
        ),
        (
            &[V4, V6],
            &["ip", "ip6"],
            &["IPv4: a connection", "IPv6: a connection"],
        ),
    ] {
        let sandbox = Sandbox::new(addresses);
        let sandbox = families
            .iter()
            .fold(sandbox, |sandbox, family| sandbox.redirect(family));
        let ended = sandbox.validate(&[]);
        ended.is(0, reported).is(0, &[&format!("uid {}", proxy())]);
        assert!(
            !ended
                .line
                .contains(if addresses.len() == 2 { "not" } else { ";" }),
            "{ended:?}"
        );
    }
}

#[test]
fn a_proxy_that_shares_its_ports_with_nobody_has_them_at_once_afterwards() {
    let sandbox = Sandbox::new(&[V4, V6]).redirect("ip").redirect("ip6");
    for _ in 0..5 {
        sandbox.validate(&[]).is(0, &["IPv4", "IPv6"]);
        for port in [15001, 15006] {
            sandbox.bind_alone(port);
        }
    }
}

#[test]
fn where_the_usual_address_is_not_on_lo_an_own_one_is_called() {
    let sandbox = Sandbox::new(&[V6]).redirect("ip6");
    sandbox.ip("addr del ::6/128 dev lo");
    sandbox
        .validate(&[])
        .is(0, &["[fd77::7]:15002 arrived at port 15006"]);
}

#[test]
fn a_family_without_rules_is_reported_although_the_other_has_them() {
    let sandbox = Sandbox::new(&[V4, V6]).redirect("ip");
    let missing = sandbox.validate(DEADLINE);
    missing.is(
        126,
        &[
            "IPv4: a connection to 127.0.0.6:15002 arrived",
            "IPv6: a connection to [fd77::7]:15002 was refused",
            "recreate the pod",
        ],
    );
    sandbox.validate(&["--ip-family", "ipv4"]).is(0, &["IPv4"]);
    let sandbox = Sandbox::new(&[V4, V6]).redirect("ip6");
    let missing = sandbox.validate(DEADLINE);
    missing.is(
        126,
        &[
            "IPv4: a connection to 127.0.0.6:15002 was refused",
            "IPv6: a connection to [::6]:15002 arrived",
        ],
    );
    sandbox.validate(&["--ip-family", "ipv6"]).is(0, &["IPv6"]);
}

#[test]
fn without_rules_it_ends_when_its_time_is_over_and_not_before() {
    let sandbox = Sandbox::new(&[V4, V6]);
    for (words, least) in [(DEADLINE, 700), (&["--probe-timeout=1500ms"], 1500)] {
        let ended = sandbox.validate(words);
        ended.is(126, &["not redirected"]);
        let least = Duration::from_millis(least);
        assert!(ended.took >= least, "{ended:?}");
    }
}

#[test]
fn rules_that_come_while_it_tries_are_seen() {
    let sandbox = Sandbox::new(&[V4]);
    let net = sandbox.netns.path().to_owned();
    let late = std::thread::scope(|scope| {
        let trying = scope.spawn(|| sandbox.validate(&["--timeout", "20s"]));
        // Its probes start once it listens.
        eventually("it listens", TIMEOUT, || {
            let text = run(
                "nsenter",
                &[&format!("--net={}", net.display()), "ss", "-Hltn"],
            )?;
            ensure!(text.contains("127.0.0.1:15006"), "{text}");
            anyhow::Ok(())
        })
        .unwrap();
        let script = format!(
            "table ip sidecar {{ chain output {{ type nat hook output priority -100; oifname \"lo\" ip daddr != 127.0.0.1 meta skuid {} meta l4proto tcp redirect to :15006; }}\n}}",
            proxy()
        );
        run(
            "nsenter",
            &[&format!("--net={}", net.display()), "nft", &script],
        )
        .unwrap();
        trying.join().unwrap()
    });
    late.is(0, &["arrived at port 15006"]);
}

#[test]
fn an_application_at_the_port_that_is_called_is_no_proof() {
    let sandbox = Sandbox::new(&[V4, V6]);
    let _app = App::start(&sandbox.netns, 15002).unwrap();
    let fooled = sandbox.validate(DEADLINE);
    fooled.is(
        126,
        &[
            "127.0.0.6:15002 was accepted by another listener",
            "[fd77::7]:15002 was accepted by another listener",
        ],
    );
    let sandbox = Sandbox::new(&[V4, V6]).redirect("ip").redirect("ip6");
    let _app = App::start(&sandbox.netns, 15002).unwrap();
    sandbox
        .validate(&[])
        .is(0, &["IPv4: a connection", "IPv6: a connection"]);
}

#[test]
fn a_proxy_that_has_the_ports_already_is_looked_behind() {
    for (uid, shares) in [(0, false), (proxy(), true), (0, true)] {
        let listening =
            |sandbox: &Sandbox| [15001, 15006].map(|port| sandbox.listen_as(uid, port, shares));
        let redirected = Sandbox::new(&[V4, V6]).redirect("ip").redirect("ip6");
        let _proxy = listening(&redirected);
        redirected.validate(&[]).is(
            0,
            &[
                "IPv4: a connection to 127.0.0.6:15002 arrived at port 15006",
                "IPv6: a connection to [::6]:15002 arrived at port 15006",
            ],
        );
        let bare = Sandbox::new(&[V4, V6]);
        let _proxy = listening(&bare);
        bare.validate(DEADLINE).is(
            126,
            &["127.0.0.6:15002 was refused", "[fd77::7]:15002 was refused"],
        );
    }
}

#[test]
fn an_application_beside_a_proxy_that_has_the_ports_is_no_proof() {
    let sandbox = Sandbox::new(&[V4]);
    let _proxy = [15001, 15006].map(|port| sandbox.listen_as(0, port, false));
    let _app = App::start(&sandbox.netns, 15002).unwrap();
    sandbox
        .validate(DEADLINE)
        .is(126, &["was accepted by another listener"]);
}

#[test]
fn another_user_than_the_proxys_is_named() {
    if is_alone() {
        return not_run("there is no other user");
    }
    let sandbox = Sandbox::new(&[V4]).redirect("ip");
    sandbox
        .validate_as(1338, DEADLINE)
        .is(126, &["uid 1338", "proxy's user"]);
}

#[test]
fn what_cannot_be_tried_is_no_proof_of_anything() {
    let sandbox = Sandbox::new(&[]);
    sandbox
        .validate(DEADLINE)
        .is(1, &["no address except loopback"]);
    sandbox.validate(&["--tiemout"]).is(2, &["--tiemout"]);
    sandbox
        .validate(&["istio-iptables", "-u", "1337"])
        .is(2, &["applies no rules"]);
}

#[test]
fn the_container_of_an_unchanged_template_of_istio_runs() {
    let words = "istio-iptables -p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020 --log_output_level=default:info --run-validation --skip-rule-apply";
    let words: Vec<_> = words.split(' ').collect();
    let sandbox = Sandbox::new(&[V4]);
    let short: Vec<_> = words
        .iter()
        .copied()
        .chain(["--probe-timeout", "300ms"])
        .collect();
    sandbox.validate(&short).is(126, &["was refused"]);
    sandbox
        .redirect("ip")
        .validate(&words)
        .is(0, &["arrived at port 15006"]);
}

#[test]
fn a_pod_of_one_family_is_not_asked_for_the_other() {
    let sandbox = Sandbox::new(&[V4]).redirect("ip");
    let ended = sandbox.validate(&[]);
    ended.is(0, &["IPv4"]);
    assert!(!ended.line.contains("IPv6"), "{ended:?}");
    let asked = sandbox.validate(&["--ip-family", "ipv6", "--timeout", "300ms"]);
    asked.is(126, &["[::6]:15002"]);
}
