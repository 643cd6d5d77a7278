//! A connection's path, its ends' identities, and the source that the application saw.

use std::{fs, net::SocketAddr, os::unix::fs::MetadataExt as _};

use integration::{TIMEOUT, eventually};

use crate::ztunnel::mesh::{FIRST, Mesh, PORT, Wire};

#[test]
fn two_pods_of_the_mesh_speak_by_hbone_with_mtls_and_the_application_sees_who_asks() {
    let mesh = Mesh::new().unwrap();
    let wire = Wire::watch(&mesh, &mesh.client).unwrap();
    mesh.reached_by_hbone(&mesh.client, &mesh.server).unwrap();
    let (hbone, plain) = wire.packets().unwrap();
    assert!(
        hbone > 0 && plain == 0,
        "{hbone} packets by HBONE, {plain} past it"
    );
    mesh.reached_by_hbone(&mesh.server, &mesh.client).unwrap();
}

#[test]
fn from_outside_and_to_outside_the_mesh_it_is_plaintext_through_ztunnel() {
    let mesh = Mesh::new().unwrap();
    for (from, to, is_outbound) in [
        (&mesh.outsider, &mesh.server, false),
        (&mesh.client, &mesh.outsider, true),
    ] {
        let wire = Wire::watch(&mesh, from).unwrap();
        for (source, address) in from.addresses().into_iter().zip(to.addresses()) {
            let application = SocketAddr::new(address, PORT);
            let (seen, carried) = mesh.follow(from, application, 1).unwrap();
            assert_eq!(seen, source);
            let [one] = &carried[..] else {
                panic!("one connection, once: {carried:?}")
            };
            assert_eq!((one.is_outbound, one.hbone), (is_outbound, None), "{one:?}");
            assert_eq!((one.source.ip(), one.destination), (source, application));
            assert_eq!(
                (&one.source_identity, &one.error),
                (&None, &None),
                "{one:?}"
            );
        }
        let (hbone, plain) = wire.packets().unwrap();
        assert!(
            hbone == 0 && plain > 0,
            "{hbone} packets by HBONE, {plain} past it"
        );
    }
}

#[test]
fn after_its_del_ztunnel_holds_nothing_of_a_pod_and_the_others_are_served() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.scene.node;
    node.add(&mesh.next).unwrap();
    mesh.until_served(FIRST, 3).unwrap();
    let inode = mesh.next.netns.id().inode;
    let holds = || {
        let entries = fs::read_dir(format!("/proc/{}/fd", node.pid(FIRST)?))?;
        // A descriptor closed meanwhile is not held.
        let mut files = entries.filter_map(|entry| fs::metadata(entry.ok()?.path()).ok());
        anyhow::Ok(files.any(|file| file.ino() == inode))
    };
    assert!(holds().unwrap(), "the look must see what is held");
    node.del(&mesh.next).unwrap();
    mesh.until_served(FIRST, 2).unwrap();
    eventually("its netns is released", TIMEOUT, || {
        anyhow::ensure!(!holds()?, "it is held");
        anyhow::Ok(())
    })
    .unwrap();
    mesh.reached_by_hbone(&mesh.client, &mesh.server).unwrap();
}
