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
fn a_pod_overrides_the_node_with_booleans_as_go_parses_them() {
    let nothing = of(&settings(&[]));
    assert!(nothing.dns_capture && !nothing.bypass_inbound_capture);
    assert_eq!(nothing.ipv6(), wire::Ipv6Capture::Off);
    for (text, dns_capture, bypasses) in [
        ("true", true, true),
        ("T", true, true),
        ("false", false, false),
        ("0", false, false),
        ("yes", true, false),
        ("", true, false),
    ] {
        let annotations = [keys::DNS_CAPTURE, keys::BYPASS_INBOUND_CAPTURE];
        let request = of(&settings(&annotations.map(|name| (name, text))));
        assert_eq!(request.dns_capture, dns_capture, "{text}");
        assert_eq!(request.bypass_inbound_capture, bypasses, "{text}");
    }
    let interfaces = (keys::REROUTE_VIRTUAL_INTERFACES, " vm0, ,net1,");
    let request = of(&settings(&[interfaces]));
    assert_eq!(request.reroute_virtual_interfaces, ["vm0", "net1"]);
}

const LEFT_ALONE: (&str, &str) = (keys::EXCLUDE_OUTBOUND_PORTS, "5432");
const KEPT: (&str, &str) = (keys::KEEP_EXISTING_CONNECTIONS, "true");

#[test]
fn privileged_settings_need_a_permission_of_namespace_or_node() {
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
fn malformed_settings_are_refused_only_where_permitted() {
    let requested = requested(&[LEFT_ALONE, (keys::EXCLUDE_INBOUND_CIDRS, "everywhere")]);
    let error = granted(&requested, permit("exclude"), permit("")).unwrap_err();
    assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_CIDRS);
    let left_out = granted(&requested, permit("keep-existing"), permit("")).unwrap();
    assert_eq!(left_out, RequestedSettings::default());
}

#[test]
fn privileged_settings_are_listed_by_their_annotation() {
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
    assert_eq!(of(&read).probe_ports, None);
}
