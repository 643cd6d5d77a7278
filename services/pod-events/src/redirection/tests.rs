use super::*;

fn node() -> Capture {
    Capture {
        dns: true,
        ipv6: Ipv6::Off,
        ..Capture::default()
    }
}

fn requested(annotations: &[(&str, &str)]) -> Requested {
    let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Requested::from_annotations(Some(&annotations.iter().map(text).collect()))
}

fn permit(words: &str) -> Permissions {
    Permissions::parse(words)
}

fn settings(annotations: &[(&str, &str)]) -> RequestedSettings {
    granted(&requested(annotations), permit(""), permit("")).unwrap()
}

fn of(settings: &RequestedSettings) -> wire::AmbientRedirection {
    ambient(&node(), settings)
}

#[test]
fn the_node_decides_for_a_pod_that_asks_for_nothing() {
    let request = of(&settings(&[]));
    assert!(request.dns_capture && !request.bypass_inbound_capture);
    assert_eq!(request.ipv6(), wire::Ipv6Capture::Off);
}

#[test]
fn a_pod_decides_on_its_name_resolution_in_either_direction() {
    for (text, captured) in [
        ("false", false),
        ("0", false),
        ("true", true),
        ("nonsense", true),
    ] {
        let request = of(&settings(&[(keys::DNS_CAPTURE, text)]));
        assert_eq!(request.dns_capture, captured, "{text}");
    }
}

#[test]
fn ingress_mode_is_asked_for_with_what_go_takes_for_true() {
    for (text, bypassed) in [("true", true), ("T", true), ("yes", false), ("", false)] {
        let request = of(&settings(&[(keys::BYPASS_INBOUND_CAPTURE, text)]));
        assert_eq!(request.bypass_inbound_capture, bypassed, "{text}");
    }
}

#[test]
fn interfaces_are_named_with_commas_between_them() {
    let request = of(&settings(&[(
        keys::REROUTE_VIRTUAL_INTERFACES,
        " vm0, ,net1,",
    )]));
    assert_eq!(request.reroute_virtual_interfaces, ["vm0", "net1"]);
}

const LEFT_ALONE: (&str, &str) = (keys::EXCLUDE_OUTBOUND_PORTS, "5432");
const KEPT: (&str, &str) = (keys::KEEP_EXISTING_CONNECTIONS, "true");

#[test]
fn what_needs_a_permission_is_granted_by_the_namespace_or_the_node_or_left_out() {
    let requested = requested(&[LEFT_ALONE, KEPT, (keys::DNS_CAPTURE, "false")]);
    for (namespace, node, excludes, keeps) in [
        ("", "", false, false),
        ("exclude", "", true, false),
        ("", "exclude", true, false),
        ("keep-existing", "", false, true),
        ("exclude", "keep-existing", true, true),
    ] {
        let granted = granted(&requested, permit(namespace), permit(node)).unwrap();
        let request = of(&granted);
        let ports = request.exclusions.map(|it| it.outbound_ports);
        assert_eq!(ports, excludes.then(|| vec![5432]), "{namespace} {node}");
        assert_eq!(
            request.keep_existing_connections, keeps,
            "{namespace} {node}"
        );
        // The setting for DNS capture needs no permission.
        assert!(!request.dns_capture);
    }
}

#[test]
fn what_cannot_be_understood_is_refused_where_it_is_permitted_and_left_out_where_not() {
    let requested = requested(&[LEFT_ALONE, (keys::EXCLUDE_INBOUND_CIDRS, "everywhere")]);
    let error = granted(&requested, permit("exclude"), permit("")).unwrap_err();
    assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_CIDRS);
    let left_out = granted(&requested, permit("keep-existing"), permit("")).unwrap();
    assert_eq!(left_out, RequestedSettings::default());
}

#[test]
fn everything_that_needs_a_permission_is_listed_by_the_annotations_name() {
    let privileged = |annotations: &[(&str, &str)]| {
        let requested = requested(annotations);
        let names = requested
            .privileged()
            .map(|request| (request.annotation, request.needs));
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        privileged(&[LEFT_ALONE, KEPT]),
        [
            (keys::EXCLUDE_OUTBOUND_PORTS, Permission::Exclude),
            (keys::KEEP_EXISTING_CONNECTIONS, Permission::KeepExisting)
        ]
    );
    let bad = (keys::EXCLUDE_INBOUND_PORTS, "http");
    assert_eq!(privileged(&[bad]), [(bad.0, Permission::Exclude)]);
    let nothing = [
        (keys::EXCLUDE_INBOUND_PORTS, " , "),
        (keys::KEEP_EXISTING_CONNECTIONS, "yes"),
        (keys::BYPASS_INBOUND_CAPTURE, "true"),
    ];
    assert_eq!(privileged(&nothing), []);
}

#[test]
fn what_an_earlier_release_wrote_down_is_read() {
    let text =
        r#"{"dns_capture": true, "bypass_inbound_capture": false, "virtual_interfaces": ["vm0"]}"#;
    let read: RequestedSettings = serde_json::from_str(text).unwrap();
    assert_eq!(read.exclusions, Exclusions::default());
    assert_eq!(read.virtual_interfaces, ["vm0"]);
}
