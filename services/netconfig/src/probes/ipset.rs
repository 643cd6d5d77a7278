//! ipset's sets over netlink (linux/netfilter/ipset/ip_set.h), like its program.

use std::{collections::BTreeMap, io, net::IpAddr};

use netlink_bindings::{
    traits::{NetlinkRequest, Protocol},
    utils::{
        IterableChunks, finalize_nested_header, find_attr, push_header_type, push_nested_header,
    },
};
use nix::sys::socket::SockProtocol;

use super::refcount::Elements;
use crate::{
    family::Family,
    netlink::{KernelError, Socket},
};

/// NFNL_SUBSYS_IPSET of linux/netfilter/nfnetlink.h.
const SUBSYSTEM: u16 = 6;
/// NETLINK_NETFILTER of linux/netlink.h.
const PROTOCOL_NUMBER: u16 = 12;
/// NLM_F_EXCL: adding an existing object, or destroying a missing one, fails.
const EXCLUSIVE: u16 = 0x200;
/// NLA_F_NET_BYTEORDER, without which the kernel rejects ipset's numbers.
const NET_BYTEORDER: u16 = 0x4000;

/// IPSET_PROTOCOL, since Linux 4.20.
const PROTOCOL_VERSION: u8 = 7;
/// The first hash:ip with comments.
const REVISION: u8 = 3;

const CREATE: u16 = 2;
const DESTROY: u16 = 3;
const LIST: u16 = 7;
const ADD: u16 = 9;
const DELETE: u16 = 10;

const ATTR_PROTOCOL: u16 = 1;
const ATTR_SETNAME: u16 = 2;
const ATTR_TYPENAME: u16 = 3;
const ATTR_REVISION: u16 = 4;
const ATTR_FAMILY: u16 = 5;
const ATTR_FLAGS: u16 = 6;
const ATTR_DATA: u16 = 7;
const ATTR_ADT: u16 = 8;
/// Nested in ATTR_DATA, as the following.
const ATTR_IP: u16 = 1;
const ATTR_CADT_FLAGS: u16 = 8;
const ATTR_ELEMENTS: u16 = 24;
const ATTR_REFERENCES: u16 = 25;
const ATTR_COMMENT: u16 = 26;
/// Nested in ATTR_IP, as the following.
const ATTR_IPV4: u16 = 1;
const ATTR_IPV6: u16 = 2;

/// IPSET_FLAG_LIST_HEADER: lists without elements.
const HEADER_ONLY: u32 = 4;
const WITH_COMMENT: u32 = 16;

/// IPSET_ERR_EXIST: an element to add exists, or one to delete does not.
const ERROR_EXIST: i32 = 4103;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Rules that use the set.
    pub(crate) references: u32,
    pub(crate) elements: u32,
}

#[derive(Debug)]
pub(crate) struct Ipset(Socket);

impl Ipset {
    /// Opens the calling thread's netns.
    pub(crate) fn open() -> io::Result<Self> {
        Socket::open(SockProtocol::NetlinkNetFilter).map(Self)
    }

    /// Creates a set with comments. Keeps an existing one.
    pub(crate) fn create(&mut self, name: &str, family: Family) -> Result<(), KernelError> {
        let mut message = Message::about(name, CREATE, 0);
        message.text(ATTR_TYPENAME, "hash:ip");
        message.byte(ATTR_REVISION, REVISION);
        message.byte(ATTR_FAMILY, family.number());
        message.nested(ATTR_DATA, |data| data.number(ATTR_CADT_FLAGS, WITH_COMMENT));
        self.0.act(&format!("create the set {name}"), &message)
    }

    /// Returns `false` if there is none.
    pub(crate) fn destroy(&mut self, name: &str) -> Result<bool, KernelError> {
        let message = Message::about(name, DESTROY, EXCLUSIVE);
        match self.0.act(&format!("destroy the set {name}"), &message) {
            Err(error) if error.is(nix::Error::ENOENT) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Returns `false`, without a change, if it exists.
    pub(crate) fn add(
        &mut self,
        name: &str,
        address: IpAddr,
        comment: &str,
    ) -> Result<bool, KernelError> {
        let message = Message::element(name, (ADD, EXCLUSIVE), address, Some(comment));
        unless_exists(
            self.0
                .act(&format!("add {address} to the set {name}"), &message),
        )
    }

    /// Adds the address or replaces its comment.
    pub(crate) fn rename(
        &mut self,
        name: &str,
        address: IpAddr,
        comment: &str,
    ) -> Result<(), KernelError> {
        let message = Message::element(name, (ADD, 0), address, Some(comment));
        self.0
            .act(&format!("rename {address} in the set {name}"), &message)
    }

    pub(crate) fn delete(&mut self, name: &str, address: IpAddr) -> Result<(), KernelError> {
        let message = Message::element(name, (DELETE, 0), address, None);
        let act = format!("delete {address} from the set {name}");
        unless_exists(self.0.act(&act, &message)).map(drop)
    }

    /// Returns `None` without such a set.
    pub(crate) fn header(&mut self, name: &str) -> Result<Option<Header>, KernelError> {
        let mut message = Message::about(name, LIST, 0);
        message.number(ATTR_FLAGS, HEADER_ONLY);
        let Some(payloads) = self.list(name, &message)? else {
            return Ok(None);
        };
        Ok(payloads.iter().find_map(|payload| {
            let data = find_attr(attributes(payload), ATTR_DATA)?;
            let number = |kind| Some(u32::from_be_bytes(find_attr(data, kind)?.try_into().ok()?));
            Some(Header {
                references: number(ATTR_REFERENCES)?,
                elements: number(ATTR_ELEMENTS)?,
            })
        }))
    }

    /// Returns `None` without such a set.
    pub(crate) fn elements(&mut self, name: &str) -> Result<Option<Elements>, KernelError> {
        let message = Message::about(name, LIST, 0);
        let Some(payloads) = self.list(name, &message)? else {
            return Ok(None);
        };
        let lists = payloads
            .iter()
            .filter_map(|payload| find_attr(attributes(payload), ATTR_ADT));
        let elements = lists.flat_map(|list| {
            let data = IterableChunks::new(list).filter(|(header, _)| header.r#type == ATTR_DATA);
            data.filter_map(|(_, data)| element(data))
        });
        Ok(Some(elements.collect::<BTreeMap<_, _>>()))
    }

    fn list(&mut self, name: &str, message: &Message) -> Result<Option<Vec<Vec<u8>>>, KernelError> {
        match self.0.dump(&format!("list the set {name}"), message) {
            Err(error) if error.is(nix::Error::ENOENT) => Ok(None),
            found => found.map(Some),
        }
    }
}

fn unless_exists(result: Result<(), KernelError>) -> Result<bool, KernelError> {
    match result {
        Err(error) if error.is_number(ERROR_EXIST) => Ok(false),
        result => result.map(|()| true),
    }
}

/// Skips nfgenmsg, which has four bytes.
fn attributes(payload: &[u8]) -> &[u8] {
    payload.get(4..).unwrap_or_default()
}

fn element(data: &[u8]) -> Option<(IpAddr, String)> {
    let ip = find_attr(data, ATTR_IP)?;
    let v4 = || <[u8; 4]>::try_from(find_attr(ip, ATTR_IPV4)?).ok();
    let v6 = || <[u8; 16]>::try_from(find_attr(ip, ATTR_IPV6)?).ok();
    let address = v4().map(IpAddr::from).or_else(|| v6().map(IpAddr::from))?;
    let comment = find_attr(data, ATTR_COMMENT).unwrap_or_default();
    let comment = String::from_utf8_lossy(comment);
    Some((address, comment.trim_end_matches('\0').to_owned()))
}

struct Message {
    kind: u16,
    flags: u16,
    payload: Vec<u8>,
}

impl Message {
    /// Names the protocol version and a set; the header's family is ignored.
    fn about(name: &str, command: u16, flags: u16) -> Self {
        let mut message = Self {
            kind: (SUBSYSTEM << 8) | command,
            flags,
            payload: vec![Family::V4.number(), 0, 0, 0],
        };
        message.byte(ATTR_PROTOCOL, PROTOCOL_VERSION);
        message.text(ATTR_SETNAME, name);
        message
    }

    fn element(
        name: &str,
        (command, flags): (u16, u16),
        address: IpAddr,
        comment: Option<&str>,
    ) -> Self {
        let mut message = Self::about(name, command, flags);
        message.nested(ATTR_DATA, |data| {
            data.nested(ATTR_IP, |ip| match address {
                IpAddr::V4(v4) => ip.push(ATTR_IPV4 | NET_BYTEORDER, &v4.octets()),
                IpAddr::V6(v6) => ip.push(ATTR_IPV6 | NET_BYTEORDER, &v6.octets()),
            });
            if let Some(comment) = comment {
                data.text(ATTR_COMMENT, comment);
            }
        });
        message
    }

    fn push(&mut self, kind: u16, bytes: &[u8]) {
        let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        push_header_type(&mut self.payload, kind, length, false);
        self.payload.extend(bytes);
        self.payload
            .resize(self.payload.len().next_multiple_of(4), 0);
    }

    fn byte(&mut self, kind: u16, byte: u8) {
        self.push(kind, &[byte]);
    }

    fn text(&mut self, kind: u16, text: &str) {
        self.push(kind, &[text.as_bytes(), &[0]].concat());
    }

    fn number(&mut self, kind: u16, number: u32) {
        self.push(kind | NET_BYTEORDER, &number.to_be_bytes());
    }

    fn nested(&mut self, kind: u16, inner: impl FnOnce(&mut Self)) {
        let offset = push_nested_header(&mut self.payload, kind);
        inner(self);
        finalize_nested_header(&mut self.payload, offset);
    }
}

impl NetlinkRequest for Message {
    fn protocol(&self) -> Protocol {
        Protocol::Raw {
            protonum: PROTOCOL_NUMBER,
            request_type: self.kind,
        }
    }

    fn flags(&self) -> u16 {
        self.flags
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    type ReplyType<'buf> = ();

    fn decode_reply(_: &[u8]) {}
}
