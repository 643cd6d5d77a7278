use inpod_types::redirection::{Exclusions, InboundCapture, Selection};

use super::*;
use crate::{
    boottime::BootInstant,
    redirection::{Proxy, RequestedSettings, Sidecar},
    testing::{enrolled, pod, record, to_sidecar},
};

const ID: NetnsId = NetnsId {
    device: 4,
    inode: 7,
    cookie: u64::MAX,
};

fn checkpoint() -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&dir.path().join("pods")).unwrap();
    (dir, checkpoint)
}

#[test]
fn held_findings_are_in_the_records_but_not_yet_in_the_file() {
    let (_dir, checkpoint) = checkpoint();
    let begun = Record {
        intent: Intent::Enrolling,
        ..record("c1")
    };
    checkpoint.write(&begun).unwrap();
    let claimed = Record {
        netns_id: Some(ID),
        ..begun.clone()
    };
    checkpoint.hold(&claimed);
    assert_eq!(
        checkpoint.records().unwrap(),
        std::slice::from_ref(&claimed)
    );
    assert_eq!(
        checkpoint.load().unwrap().into_values().next(),
        Some(begun.clone())
    );
    let again = Record {
        revision: Revision(2),
        ..begun
    };
    checkpoint.write(&again).unwrap();
    assert_eq!(checkpoint.records().unwrap(), [again]);
    checkpoint.hold(&claimed);
    checkpoint.remove(&claimed.sandbox).unwrap();
    assert_eq!(checkpoint.records().unwrap(), []);
}

#[test]
fn a_record_that_cannot_be_written_leaves_no_file_behind() {
    let (dir, checkpoint) = checkpoint();
    let [known, refused] = ["c1", "c2"].map(record);
    checkpoint.write(&known).unwrap();
    // Blocks the rename, which is the last step of a write.
    fs::create_dir(checkpoint.path(&refused.sandbox)).unwrap();
    checkpoint.write(&refused).unwrap_err();
    let files = fs::read_dir(dir.path().join("pods")).unwrap();
    let files = files.filter(|file| file.as_ref().unwrap().file_type().unwrap().is_file());
    assert_eq!(files.count(), 1);
    let path = checkpoint.path(&known.sandbox);
    assert!(file::parse(&fs::read(path).unwrap(), &checkpoint.boot_id).is_ok());
}

/// The texts are literals, because the releases before and after read the files, too.
const PLAIN: &str = r#"{"schema":1,"boot_id":"b","network_name":"net","container_id":"c1","ifname":"eth0","namespace":"shop","name":"web","uid":"uid-of-web","service_account":"default","netns_path":"/run/netns/web","netns_device":null,"netns_inode":null,"netns_cookie":null,"proven":null,"addresses":["10.0.0.1"],"revision":1,"intent":"out","runtime_uid":null,"let_through":false,"wishes":{"dns_capture":null,"bypass_inbound_capture":false,"virtual_interfaces":[],"exclusions":{"outbound_ports":[],"outbound_cidrs":[],"inbound_ports":[],"inbound_cidrs":[]},"keep_existing_connections":false}}"#;

/// The part of the file of a sidecar's pod after the requested settings.
const SIDECAR: &str = r#","sidecar":{"proxy":{"uid":1337,"gid":1338,"dns":true,"drop_invalid":false},"inbound":"tproxy","inbound_ports":"all","excluded_inbound_ports":[15020],"outbound_networks":{"these":["fd00::/8"]},"excluded_outbound_networks":["10.0.0.0/8"],"outbound_ports":[80],"excluded_outbound_ports":[15020],"excluded_interfaces":["net1"],"virtual_interfaces":["vm0"]}}"#;

const AMBIENT: &str = r#"{"schema":1,"boot_id":"b","network_name":"net","container_id":"c1","ifname":"eth0","namespace":"shop","name":"web","uid":"uid-of-web","service_account":"default","netns_path":"/run/netns/web","netns_device":4,"netns_inode":7,"netns_cookie":9,"proven":{"device":4,"inode":7,"cookie":18446744073709551615},"addresses":["10.0.0.1","fd77::2"],"revision":1,"intent":"out","runtime_uid":"h1","let_through":true,"wishes":{"dns_capture":false,"bypass_inbound_capture":true,"virtual_interfaces":["vm0"],"exclusions":{"outbound_ports":[],"outbound_cidrs":["10.0.0.0/8"],"inbound_ports":[],"inbound_cidrs":[]},"keep_existing_connections":true,"probe_ports":[8080]}}"#;

fn parse(text: &str) -> Record {
    file::parse(text.as_bytes(), "b").unwrap().unwrap()
}

#[test]
fn each_intent_is_rendered_and_parsed_as_other_releases_do() {
    let since = BootInstant::after_boot(std::time::Duration::from_millis(1_234_567));
    let intents = [
        Intent::Out,
        Intent::Enrolling,
        Intent::Adopted,
        Intent::Legacy,
        enrolled(),
        Intent::Announcing,
        Intent::Leaving { since },
        Intent::Draining { since },
        Intent::Deleting { since },
    ];
    let text = r#"["out","enrolling","inherited","legacy",{"enrolled":{"fingerprint":"f"}},"announcing",{"leaving":{"since_ms":1234567}},{"draining":{"since_ms":1234567}},{"deleting":{"since_ms":1234567}}]"#;
    assert_eq!(serde_json::to_string(&intents).unwrap(), text);
    assert_eq!(serde_json::from_str::<[Intent; 9]>(text).unwrap(), intents);
    assert_eq!(serde_json::json!(Intent::ServedLegacy), "legacy");
}

#[test]
fn each_redirection_is_rendered_and_parsed_as_others_do() {
    let ambient = Record {
        netns: NetnsRef {
            device: Some(4),
            inode: Some(7),
            cookie: Some(9),
            ..record("c1").netns
        },
        netns_id: Some(ID),
        addresses: ["10.0.0.1", "fd77::2"].map(|it| it.parse().unwrap()).into(),
        runtime_uid: Some("h1".parse().unwrap()),
        admitted_unenrolled: true,
        redirection: Redirection::Ambient(RequestedSettings {
            dns_capture: Some(false),
            bypass_inbound_capture: true,
            virtual_interfaces: vec!["vm0".into()],
            exclusions: Exclusions {
                outbound_cidrs: ["10.0.0.0/8".parse().unwrap()].into(),
                ..Exclusions::default()
            },
            keep_existing_connections: true,
            probe_ports: Some([8080.try_into().unwrap()].into()),
        }),
        ..record("c1")
    };
    let sidecars = Record {
        redirection: Redirection::Sidecar(Box::new(sidecar())),
        ..record("c1")
    };
    // A release that knows no sidecars refuses schema 2.
    let schema_2 = PLAIN.replace("schema\":1", "schema\":2");
    let text = schema_2.strip_suffix('}').unwrap().to_owned() + SIDECAR;
    for (record, text) in [(ambient, AMBIENT), (sidecars, &text)] {
        assert_eq!(file::render(&record, "b"), text);
        assert_eq!(parse(text), record);
    }
}

#[test]
fn older_files_are_parsed_and_newer_ones_are_refused_by_number() {
    let (older, _) = PLAIN.split_once(r#","runtime_uid""#).unwrap();
    assert_eq!(parse(&format!("{older}}}")), record("c1"));
    let newer = PLAIN.replace("schema\":1", "schema\":3");
    let error = file::parse(newer.as_bytes(), "b").unwrap_err();
    assert!(error.to_string().contains("schema 3"), "{error}");
}

fn sidecar() -> Sidecar {
    Sidecar {
        proxy: Proxy {
            uid: 1337,
            gid: 1338,
            dns: true,
            drop_invalid: false,
        },
        inbound: InboundCapture::Tproxy,
        inbound_ports: Selection::All,
        excluded_inbound_ports: [15020.try_into().unwrap()].into(),
        outbound_networks: Selection::These(["fd00::/8".parse().unwrap()].into()),
        excluded_outbound_networks: ["10.0.0.0/8".parse().unwrap()].into(),
        outbound_ports: [80.try_into().unwrap()].into(),
        excluded_outbound_ports: [15020.try_into().unwrap()].into(),
        excluded_interfaces: ["net1".parse().unwrap()].into(),
        virtual_interfaces: ["vm0".parse().unwrap()].into(),
    }
}

#[test]
fn an_applied_sidecar_redirection_without_a_claim_is_detached() {
    let of = |redirection: Redirection, intent| Record {
        redirection,
        intent,
        ..record("c1")
    };
    assert!(of(to_sidecar(), enrolled()).is_detached());
    assert!(!of(to_sidecar(), Intent::Adopted).is_detached());
    assert!(!of(Redirection::default(), enrolled()).is_detached());
    let claimed = Record {
        netns_id: Some(ID),
        ..of(to_sidecar(), enrolled())
    };
    assert!(claimed.is_managed() && !claimed.is_detached());
}

#[test]
fn a_record_belongs_to_its_pod_by_uid_hash_or_else_name() {
    let of = |uid: &str, hash: Option<&str>| {
        let mut pod = pod("shop", "web");
        pod.pod.uid = uid.parse().unwrap();
        pod.runtime_uid = hash.map(|hash| hash.parse().unwrap());
        pod
    };
    let plain = record("c1");
    assert!(plain.belongs_to(&of("uid-of-web", None)) && !plain.belongs_to(&of("another", None)));
    let static_pod = Record {
        runtime_uid: Some("h1".parse().unwrap()),
        ..record("c1")
    };
    assert!(static_pod.belongs_to(&of("made-anew", Some("h1"))));
    assert!(!static_pod.belongs_to(&of("made-anew", Some("h2"))));
    let mut unnamed = Record {
        admitted_unenrolled: true,
        ..record("c1")
    };
    assert!(!unnamed.belongs_to(&of("another", None)));
    unnamed.pod.uid = "c1".parse().unwrap();
    assert!(unnamed.belongs_to(&of("another", None)));
}

#[test]
fn records_of_another_boot_are_dropped() {
    let (_dir, checkpoint) = checkpoint();
    let earlier = Checkpoint {
        boot_id: "an-earlier-boot".into(),
        ..checkpoint.clone()
    };
    earlier.write(&record("c1")).unwrap();
    assert!(checkpoint.load().unwrap().is_empty());
    assert_eq!(fs::read_dir(&checkpoint.directory).unwrap().count(), 0);
}

#[test]
fn an_unreadable_record_is_set_aside_and_the_others_are_read() {
    let (_dir, checkpoint) = checkpoint();
    checkpoint.write(&record("c1")).unwrap();
    fs::write(checkpoint.directory.join("x.json"), "{").unwrap();
    fs::write(checkpoint.directory.join("y.json"), b"\xff\xfe").unwrap();
    assert_eq!(checkpoint.records().unwrap().len(), 1);
    assert_eq!(checkpoint.load().unwrap().len(), 1);
    assert!(checkpoint.directory.join("x.unreadable").exists());
    assert!(checkpoint.directory.join("y.unreadable").exists());
}

#[test]
fn each_sandbox_has_a_file_until_its_record_is_removed() {
    let (_dir, checkpoint) = checkpoint();
    let one = record("c1");
    let mut two = one.clone();
    two.sandbox.ifname = "net1".parse().unwrap();
    checkpoint.write(&one).unwrap();
    checkpoint.write(&two).unwrap();
    let temporary = checkpoint.path(&one.sandbox).with_extension("tmp");
    fs::write(&temporary, "{\"sch").unwrap();
    let loaded = checkpoint.load().unwrap();
    assert!(!temporary.exists());
    assert!(loaded.into_values().eq([one.clone(), two.clone()]));
    for _ in 0..2 {
        checkpoint.remove(&one.sandbox).unwrap();
        assert!(checkpoint.load().unwrap().into_values().eq([two.clone()]));
    }
}
