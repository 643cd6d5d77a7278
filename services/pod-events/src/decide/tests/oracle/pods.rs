//! Generates random pods: most are injected, and some occur only in a generator.

use proptest::{collection::vec, option, prelude::*, sample::select};
use serde_json::{Value, json};

fn text_of(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
    select(texts).prop_map(str::to_owned)
}

/// Generates lists, some malformed, seldom a wildcard or nothing.
fn list(good: &'static [&'static str], bad: &'static [&'static str]) -> BoxedStrategy<String> {
    let joined = |all: Vec<String>| all.join(",");
    let good = vec(text_of(good), 0..5).prop_map(joined).boxed();
    let mixed = (good.clone(), text_of(bad)).prop_map(|(good, bad)| format!("{good},{bad}"));
    prop_oneof![20 => good, 1 => mixed, 2 => Just("*".to_owned()), 1 => text_of(bad)].boxed()
}

/// Generates lists of ports, some of them longer than netconfig accepts.
fn ports() -> BoxedStrategy<String> {
    let good = &["80", " 443 ", "0", "0022", "65535", "15020", "15090"];
    let long = vec(1..2000_u32, 60..70).prop_map(|all| {
        let all: Vec<_> = all.iter().map(u32::to_string).collect();
        all.join(",")
    });
    let usual = list(
        good,
        &["", "x", "-1", "+1", "٨٠", "65536", "*", "8 0", "8;0", "8-9"],
    );
    prop_oneof![9 => usual, 1 => long].boxed()
}

fn networks() -> BoxedStrategy<String> {
    let good = &[
        "10.0.0.0/8",
        "10.1.2.3/9",
        "0.0.0.0/0",
        "127.0.0.1/32",
        "fd00::1/8",
        "::/0",
        "::6/128",
    ];
    let bad = &[
        "",
        " 10.0.0.0/8",
        "10.0.0.0",
        "10.0.0.0/33",
        "10.0.0.0/+8",
        "010.0.0.0/8",
        "fd00::%eth0/64",
        "::ffff:1.2.3.4/128",
        "1.2.3.4/08",
        "*",
    ];
    list(good, bad)
}

fn names() -> BoxedStrategy<String> {
    let good = &["eth0", " net1 ", "a-b_c.d", "Z9"];
    list(
        good,
        &["", "0a", "-i", "éth0", "a\nb", "sixteen-bytes-ab", "*"],
    )
}

fn one(
    name: &'static str,
    value: BoxedStrategy<String>,
) -> impl Strategy<Value = Option<(String, String)>> {
    option::weighted(0.35, value).prop_map(move |value| Some((name.to_owned(), value?)))
}

fn annotations() -> impl Strategy<Value = Vec<(String, String)>> {
    let modes = text_of(&["REDIRECT", "TPROXY", "TPROXY", "NONE", "tproxy", ""]).boxed();
    let inject = text_of(&["true", "false", "False", "0", ""]).boxed();
    let status = ("sidecar.istio.io/status".to_owned(), "{}".to_owned());
    let first = (
        option::weighted(0.9, Just(status)),
        one("sidecar.istio.io/interceptionMode", modes),
        one("sidecar.istio.io/inject", inject),
        one(
            "traffic.sidecar.istio.io/includeOutboundIPRanges",
            networks(),
        ),
        one(
            "traffic.sidecar.istio.io/excludeOutboundIPRanges",
            networks(),
        ),
        one("traffic.sidecar.istio.io/includeInboundPorts", ports()),
    );
    let second = (
        one("traffic.sidecar.istio.io/excludeInboundPorts", ports()),
        one("traffic.sidecar.istio.io/excludeOutboundPorts", ports()),
        one("traffic.sidecar.istio.io/includeOutboundPorts", ports()),
        one("traffic.sidecar.istio.io/excludeInterfaces", names()),
        one("istio.io/reroute-virtual-interfaces", names()),
        one("traffic.sidecar.istio.io/kubevirtInterfaces", names()),
    );
    (first, second).prop_map(|((a, b, c, d, e, f), (g, h, i, j, k, l))| {
        let all = [a, b, c, d, e, f, g, h, i, j, k, l];
        all.into_iter().flatten().collect()
    })
}

fn proxies() -> impl Strategy<Value = Value> {
    let value = prop_oneof![
        8 => text_of(&["true", "false", "1", "0", "T", "yes", ""]).prop_map(|it| json!({"value": it})),
        1 => Just(json!({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})),
    ];
    let names = &[
        "ISTIO_META_DNS_CAPTURE",
        "INVALID_DROP",
        "ISTIO_DUAL_STACK",
        "OTHER",
    ];
    let named = prop_oneof![12 => text_of(names), 1 => Just("DISABLE_ENVOY".to_owned())];
    let variable = (named, value).prop_map(|(name, mut it)| {
        it["name"] = name.into();
        it
    });
    let args = select(vec![
        json!(["proxy", "sidecar"]),
        json!(["proxy", "sidecar", "router"]),
        json!(["proxy"]),
        json!([]),
        json!(null),
        json!(["proxy", "router"]),
        json!(["proxy", ""]),
        json!(["other", "router"]),
    ]);
    let id = || {
        option::of(select(vec![
            -1,
            0,
            1,
            1337,
            4_294_967_295,
            4_294_967_296_i64,
        ]))
    };
    let context = option::weighted(0.8, (id(), id()));
    (vec(variable, 0..4), args, context).prop_map(|(env, args, context)| {
        let context = context.map(|(user, group)| json!({"runAsUser": user, "runAsGroup": group}));
        json!({"name": "istio-proxy", "env": env, "args": args, "securityContext": context})
    })
}

pub(super) fn pods() -> impl Strategy<Value = Value> {
    let labels = (
        option::weighted(0.2, text_of(&["true", "false", "False", ""])),
        option::weighted(0.3, text_of(&["ambient", "none"])),
    );
    let places = &["containers", "containers", "initContainers", "nowhere"];
    let init =
        prop_oneof![5 => text_of(&["istio-validation", "setup"]), 1 => text_of(&["istio-init"])];
    let phase =
        prop_oneof![4 => text_of(&["Running"]), 3 => text_of(&["Pending", "Failed", "Succeeded"])];
    let rest = (
        proxies(),
        text_of(places),
        init,
        phase,
        proptest::bool::weighted(0.05),
    );
    (annotations(), labels, rest).prop_map(|(annotations, (inject, mode), rest)| {
        let (proxy, place, init, phase, host_network) = rest;
        let mut pod = json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u", "labels": {}, "annotations": {}},
            "spec": {
                "hostNetwork": host_network,
                "initContainers": [{"name": init}],
                "containers": [{"name": "app"}],
                "securityContext": {"runAsUser": 77},
            },
            "status": {"phase": phase},
        });
        for (name, value) in annotations {
            pod["metadata"]["annotations"][name] = value.into();
        }
        for (name, value) in [("sidecar.istio.io/inject", inject), ("istio.io/dataplane-mode", mode)] {
            if let Some(value) = value {
                pod["metadata"]["labels"][name] = value.into();
            }
        }
        if let Some(list) = pod["spec"].get_mut(&place).and_then(Value::as_array_mut) {
            list.push(proxy);
        }
        pod
    })
}
