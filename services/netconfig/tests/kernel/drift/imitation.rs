//! A process of the pod that imitates netconfig's netlink sockets, whose port and numbers the pod can see.

use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};

use super::{start, watcher::Watcher};
use crate::harness::pod_netns;

/// NFNLGRP_NFTABLES, as a bit.
const GROUP: u32 = 1 << 6;
const HEADER_BYTES: usize = 16;
/// NFNL_SUBSYS_NFTABLES, of which 2 is NFT_MSG_DELTABLE and 15 NFT_MSG_NEWGEN.
const SUBSYSTEM: u16 = 10 << 8;
/// NFNL_MSG_BATCH_BEGIN and NFNL_MSG_BATCH_END.
const BATCH: [u16; 2] = [16, 17];

/// Opens a socket in the calling thread's netns.
fn open(port: u32, groups: u32) -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC;
    let protocol = SockProtocol::NetlinkNetFilter;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol).unwrap();
    bind(fd.as_raw_fd(), &NetlinkAddr::new(port, groups)).unwrap();
    fd
}

/// Returns number and port of the last transaction.
fn last_transaction(listener: &OwnedFd) -> (u32, u32) {
    let (mut buffer, mut last) = ([0; 4096], None);
    while recv(listener.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).is_ok() {
        let number = |at: usize| u32::from_ne_bytes(*buffer[at..].first_chunk().unwrap());
        let kind = u16::from_ne_bytes(*buffer[4..].first_chunk().unwrap());
        if kind == SUBSYSTEM | 15 {
            last = Some((number(8), number(12)));
        }
    }
    last.unwrap()
}

fn message(kind: u16, number: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_BYTES + payload.len()).unwrap();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    // NLM_F_REQUEST.
    bytes.extend(1_u16.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Deletes a table of the family inet by a transaction in which every message has the same number.
fn delete_table(port: u32, number: u32, table: &str) {
    let name = format!("{table}\0");
    let length = u16::try_from(4 + name.len()).unwrap();
    // A struct nfgenmsg (family, version, resource in network order), then the attribute NFTA_TABLE_NAME.
    let mut delete = vec![1, 0, 0, 0];
    delete.extend(length.to_ne_bytes());
    delete.extend(1_u16.to_ne_bytes());
    delete.extend(name.bytes());
    let subsystem = [0, 0, 0, 10];
    let [begin, end] = BATCH.map(|kind| message(kind, number, &subsystem));
    let batch = [begin, message(SUBSYSTEM | 2, number, &delete), end].concat();
    let fd = open(port, 0);
    send(fd.as_raw_fd(), &batch, MsgFlags::empty()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_with_netconfigs_port_and_number_is_told() {
    let mut netconfig = start(&[]).await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    let (_, watcher) = Watcher::open(&mut netconfig).await;
    let listener = fresh.run(|| open(0, GROUP));
    netconfig.apply("c1").await;
    assert!(watcher.wait_for_states("c1", 1).await.intact);
    let (number, port) = last_transaction(&listener);
    fresh.run(move || delete_table(port, number, "inpod-nat"));
    let tables = fresh.nft("list tables");
    assert!(!tables.contains("inpod-nat"), "{tables}");
    assert!(!watcher.wait_for_states("c1", 2).await.intact);
}
