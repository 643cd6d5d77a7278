//! A pod's DNS queries go to ztunnel.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{Pod, TIMEOUT, eventually};

use crate::ztunnel::mesh::{Mesh, PORT, SERVICE};

/// Queries an IPv4 address (RFC 1035, 4.1); returns the answer's last four bytes.
fn resolve(pod: &Pod, name: &str, resolver: SocketAddr) -> anyhow::Result<Ipv4Addr> {
    let socket = pod.netns.within(|| UdpSocket::bind("0.0.0.0:0"))??;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    // Id, recursion desired, one question.
    let mut question = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(u8::try_from(label.len())?);
        question.extend(label.as_bytes());
    }
    // The root, type A, class IN.
    question.extend([0, 0, 1, 0, 1]);
    socket.send_to(&question, resolver)?;
    let mut answer = [0; 512];
    let (length, from) = socket.recv_from(&mut answer).context("no answer")?;
    ensure!(from == resolver, "{from} answered for {resolver}");
    let answer = answer.get(..length).context("its bytes")?;
    ensure!(
        answer.get(7) == Some(&1),
        "no answer of one record: {answer:?}"
    );
    // The record ends with its data.
    let data: [u8; 4] = answer.last_chunk().copied().context("four bytes")?;
    Ok(data.into())
}

#[test]
fn a_pod_with_captured_names_is_told_a_services_address_and_reaches_it_by_hbone_and_others_are_not()
{
    let mesh = Mesh::new().unwrap();
    // Nothing listens there.
    let resolver = SocketAddr::from(([10, 77, 255, 1], 53));
    let name = "server.shop.svc.cluster.local";
    let reported = eventually("ztunnel answers", TIMEOUT, || {
        resolve(&mesh.client, name, resolver)
    });
    let address = reported.unwrap();
    assert_eq!(address, SERVICE);
    assert!(resolve(&mesh.server, name, resolver).is_err());
    let service = SocketAddr::new(address.into(), 80);
    let (seen, carried) = mesh.follow(&mesh.client, service, 2).unwrap();
    assert_eq!(seen, mesh.client.v4);
    let application = SocketAddr::new(mesh.server.v4.into(), PORT);
    assert!(
        carried.iter().all(|it| it.hbone == Some(application)),
        "{carried:?}"
    );
}
