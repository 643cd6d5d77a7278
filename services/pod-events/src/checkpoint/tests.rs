use super::*;
use crate::{
    boottime::BootInstant,
    redirection::{Exclusions, Inbound, Proxy, RequestedSettings, Selection, Sidecar},
    testing::{pod, record},
};

fn checkpoint() -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&dir.path().join("pods")).unwrap();
    (dir, checkpoint)
}

#[test]
fn what_was_written_is_read_back() {
    let (_dir, checkpoint) = checkpoint();
    let since = BootInstant::after_boot(std::time::Duration::from_millis(1_234_567));
    let intents = [
        Intent::Out,
        Intent::Enrolling,
        Intent::Adopted,
        Intent::Enrolled {
            fingerprint: "f".into(),
        },
        Intent::Leaving { since },
        Intent::Draining { since },
        Intent::Deleting { since },
    ];
    for intent in intents {
        let record = Record {
            intent,
            ..record("c1")
        };
        checkpoint.write(&record).unwrap();
        assert_eq!(
            checkpoint.load().unwrap().into_values().collect::<Vec<_>>(),
            [record]
        );
    }
}

#[test]
fn what_a_step_found_out_is_in_the_records_and_not_in_the_file_until_it_is_written() {
    let (_dir, checkpoint) = checkpoint();
    let begun = Record {
        intent: Intent::Enrolling,
        ..record("c1")
    };
    checkpoint.write(&begun).unwrap();
    let id = NetnsId {
        device: 4,
        inode: 7,
        cookie: 9,
    };
    let claimed = Record {
        netns_id: Some(id),
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
fn a_record_that_cannot_be_written_leaves_nothing_and_what_was_written_before_stays() {
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

#[test]
fn an_unenrolled_admission_the_runtimes_uid_and_the_requested_settings_are_read_back() {
    let (_dir, checkpoint) = checkpoint();
    let record = Record {
        admitted_unenrolled: true,
        runtime_uid: Some("h1".parse().unwrap()),
        redirection: Redirection::Ambient(RequestedSettings {
            dns_capture: Some(false),
            bypass_inbound_capture: true,
            virtual_interfaces: vec!["vm0".into()],
            exclusions: Exclusions {
                outbound_cidrs: ["10.0.0.0/8".parse().unwrap()].into(),
                ..Exclusions::default()
            },
            keep_existing_connections: true,
        }),
        ..record("c1")
    };
    checkpoint.write(&record).unwrap();
    let read: Vec<_> = checkpoint.load().unwrap().into_values().collect();
    assert_eq!(read, [record]);
}

fn sidecar() -> Sidecar {
    Sidecar {
        proxy: Proxy {
            uid: 1337,
            gid: 1338,
            dns: true,
            drop_invalid: false,
        },
        inbound: Inbound::Tproxy,
        inbound_ports: Selection::All,
        excluded_inbound_ports: [15020.try_into().unwrap()].into(),
        outbound_networks: Selection::These(["fd00::/8".parse().unwrap()].into()),
        excluded_outbound_networks: ["10.0.0.0/8".parse().unwrap()].into(),
        outbound_ports: [80.try_into().unwrap()].into(),
        excluded_outbound_ports: [15020.try_into().unwrap()].into(),
        excluded_interfaces: ["net1".to_owned()].into(),
        virtual_interfaces: ["vm0".to_owned()].into(),
    }
}

#[test]
fn the_redirection_to_a_sidecar_is_read_back_and_no_earlier_release_takes_it_for_ztunnels() {
    let (_dir, checkpoint) = checkpoint();
    let ambient = record("c1");
    let sidecars = Record {
        redirection: Redirection::Sidecar(Box::new(sidecar())),
        ..record("c2")
    };
    for (record, schema) in [(ambient, 1), (sidecars, 2)] {
        checkpoint.write(&record).unwrap();
        let read = checkpoint.load().unwrap();
        assert_eq!(read.get(&record.sandbox), Some(&record));
        let text = fs::read_to_string(checkpoint.path(&record.sandbox)).unwrap();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(file["schema"], schema);
    }
}

#[test]
fn a_sidecars_redirection_is_detached_where_it_is_applied_without_a_claim() {
    let of = |redirection: Redirection, intent| Record {
        redirection,
        intent,
        ..record("c1")
    };
    let enrolled = || Intent::Enrolled {
        fingerprint: "f".into(),
    };
    let to_sidecar = || Redirection::Sidecar(Box::new(sidecar()));
    assert!(of(to_sidecar(), enrolled()).is_detached());
    assert!(!of(to_sidecar(), Intent::Adopted).is_detached());
    assert!(!of(Redirection::default(), enrolled()).is_detached());
    let claimed = Record {
        netns_id: Some(NetnsId {
            device: 4,
            inode: 7,
            cookie: 9,
        }),
        ..of(to_sidecar(), enrolled())
    };
    assert!(claimed.is_managed() && !claimed.is_detached());
}

#[test]
fn a_record_is_of_the_pod_of_its_uid_its_hash_or_where_there_was_none_its_name() {
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
fn a_removed_record_is_gone_and_may_be_removed_again() {
    let (_dir, checkpoint) = checkpoint();
    let record = record("c1");
    checkpoint.write(&record).unwrap();
    checkpoint.remove(&record.sandbox).unwrap();
    checkpoint.remove(&record.sandbox).unwrap();
    assert!(checkpoint.load().unwrap().is_empty());
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
fn a_write_that_was_cut_short_leaves_the_earlier_record() {
    let (_dir, checkpoint) = checkpoint();
    let record = record("c1");
    checkpoint.write(&record).unwrap();
    fs::write(
        checkpoint.path(&record.sandbox).with_extension("tmp"),
        "{\"sch",
    )
    .unwrap();
    assert_eq!(
        checkpoint.load().unwrap().into_values().collect::<Vec<_>>(),
        [record]
    );
}

#[test]
fn sandboxes_that_differ_in_the_interface_alone_have_files_of_their_own() {
    let (_dir, checkpoint) = checkpoint();
    let one = record("c1");
    let mut two = one.clone();
    two.sandbox.ifname = "net1".parse().unwrap();
    checkpoint.write(&one).unwrap();
    checkpoint.write(&two).unwrap();
    assert_eq!(checkpoint.load().unwrap().len(), 2);
}
