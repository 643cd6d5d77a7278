use super::*;

fn node() -> Capture {
    Capture {
        dns: true,
        ipv6: Ipv6::Off,
        inbound: Inbound::Redirect,
        sidecars: Sidecars::default(),
    }
}

fn asks(annotations: &[(&str, &str)]) -> Requested {
    let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Requested::from_annotations(Some(&annotations.iter().map(text).collect()))
}

fn permit(words: &str) -> Permissions {
    Permissions::parse(words)
}

fn settings(annotations: &[(&str, &str)]) -> RequestedSettings {
    granted(&asks(annotations), permit(""), permit("")).unwrap()
}

fn of(settings: &RequestedSettings) -> wire::AmbientRedirection {
    ambient(&node(), settings)
}

#[test]
fn the_node_decides_for_a_pod_that_asks_for_nothing() {
    let asked = of(&settings(&[]));
    assert!(asked.dns_capture && !asked.bypass_inbound_capture);
    assert_eq!(asked.ipv6(), wire::Ipv6Capture::Off);
}

#[test]
fn a_pod_decides_on_its_name_resolution_in_either_direction() {
    for (text, captured) in [
        ("false", false),
        ("0", false),
        ("true", true),
        ("nonsense", true),
    ] {
        let asked = of(&settings(&[(keys::DNS_CAPTURE, text)]));
        assert_eq!(asked.dns_capture, captured, "{text}");
    }
}

#[test]
fn ingress_mode_is_asked_for_with_what_go_takes_for_true() {
    for (text, bypassed) in [("true", true), ("T", true), ("yes", false), ("", false)] {
        let asked = of(&settings(&[(keys::BYPASS_INBOUND_CAPTURE, text)]));
        assert_eq!(asked.bypass_inbound_capture, bypassed, "{text}");
    }
}

#[test]
fn interfaces_are_named_with_commas_between_them() {
    let asked = of(&settings(&[(
        keys::REROUTE_VIRTUAL_INTERFACES,
        " vm0, ,net1,",
    )]));
    assert_eq!(asked.reroute_virtual_interfaces, ["vm0", "net1"]);
}

const LEFT_ALONE: (&str, &str) = (keys::EXCLUDE_OUTBOUND_PORTS, "5432");
const KEPT: (&str, &str) = (keys::KEEP_EXISTING_CONNECTIONS, "true");

#[test]
fn what_needs_a_permission_is_granted_by_the_namespace_or_the_node_or_left_out() {
    let asks = asks(&[LEFT_ALONE, KEPT, (keys::DNS_CAPTURE, "false")]);
    for (namespace, node, excludes, keeps) in [
        ("", "", false, false),
        ("exclude", "", true, false),
        ("", "exclude", true, false),
        ("keep-existing", "", false, true),
        ("exclude", "keep-existing", true, true),
    ] {
        let granted = granted(&asks, permit(namespace), permit(node)).unwrap();
        let asked = of(&granted);
        let ports = asked.exclusions.map(|it| it.outbound_ports);
        assert_eq!(ports, excludes.then(|| vec![5432]), "{namespace} {node}");
        assert_eq!(asked.keep_existing_connections, keeps, "{namespace} {node}");
        // This needs no permission.
        assert!(!asked.dns_capture);
    }
}

#[test]
fn what_cannot_be_understood_is_refused_where_it_is_permitted_and_left_out_where_not() {
    let asks = asks(&[LEFT_ALONE, (keys::EXCLUDE_INBOUND_CIDRS, "everywhere")]);
    let error = granted(&asks, permit("exclude"), permit("")).unwrap_err();
    assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_CIDRS);
    let left_out = granted(&asks, permit("keep-existing"), permit("")).unwrap();
    assert_eq!(left_out, RequestedSettings::default());
}

#[test]
fn everything_that_needs_a_permission_is_told_by_the_annotations_name() {
    let told = |annotations: &[(&str, &str)]| {
        let asks = asks(annotations);
        let names = asks
            .privileged()
            .map(|asked| (asked.annotation, asked.needs));
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        told(&[LEFT_ALONE, KEPT]),
        [
            (keys::EXCLUDE_OUTBOUND_PORTS, Permission::Exclude),
            (keys::KEEP_EXISTING_CONNECTIONS, Permission::KeepExisting)
        ]
    );
    let bad = (keys::EXCLUDE_INBOUND_PORTS, "http");
    assert_eq!(told(&[bad]), [(bad.0, Permission::Exclude)]);
    let nothing = [
        (keys::EXCLUDE_INBOUND_PORTS, " , "),
        (keys::KEEP_EXISTING_CONNECTIONS, "yes"),
        (keys::BYPASS_INBOUND_CAPTURE, "true"),
    ];
    assert_eq!(told(&nothing), []);
}

#[test]
fn what_an_earlier_release_wrote_down_is_read() {
    let text =
        r#"{"dns_capture": true, "bypass_inbound_capture": false, "virtual_interfaces": ["vm0"]}"#;
    let read: RequestedSettings = serde_json::from_str(text).unwrap();
    assert_eq!(read.exclusions, Exclusions::default());
    assert_eq!(read.virtual_interfaces, ["vm0"]);
}
