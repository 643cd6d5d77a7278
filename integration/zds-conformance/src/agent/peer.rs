//! A played ztunnel under the control of a case. The peer checks every packet against the general rules.

use std::{
    cell::Cell,
    fs,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::stat::fstat,
};
use prost::Message as _;
use zds_client::proto::{WorkloadRequest, workload_request::Payload};

use crate::{
    case::{Outcome, check, failed},
    netns::Netns,
    wire::{self, ACK, Connection, HELLO, Incoming, MAX_REQUEST_BYTES, Packet},
};

/// The time for which the kit watches for a second request before an answer.
const GLANCE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct Request {
    pub payload: Payload,
    pub descriptor: Option<OwnedFd>,
}

impl Request {
    pub fn describe(&self) -> String {
        wire::describe(&self.payload)
    }

    pub fn uid(&self) -> Option<&str> {
        match &self.payload {
            Payload::Add(add) => Some(&add.uid),
            Payload::Keep(keep) => Some(&keep.uid),
            Payload::Del(del) => Some(&del.uid),
            Payload::SnapshotSent(_) => None,
        }
    }

    pub fn is(&self, expected: &str) -> Outcome {
        check(self.describe() == expected, expected, || self.describe())
    }

    pub fn adds(&self, uid: &str, netns: &Netns) -> Outcome {
        self.is(&format!("Add {uid}"))?;
        let Some(descriptor) = &self.descriptor else {
            return failed("A5: a descriptor with an Add", "none");
        };
        let stat = fstat(descriptor).map_err(std::io::Error::from)?;
        let expected = netns.identity()?;
        let expected_words = format!("A5: the netns of {uid}, (device, inode) {expected:?}");
        check(
            (stat.st_dev, stat.st_ino) == expected,
            &expected_words,
            || format!("({}, {})", stat.st_dev, stat.st_ino),
        )
    }
}

#[derive(Debug)]
pub struct Peer {
    connection: Connection,
    deadline: Duration,
    greeted: Cell<bool>,
    snapshot_sent: Cell<bool>,
    in_flight: Cell<bool>,
}

impl Peer {
    /// Wraps a new connection before the first packet.
    pub fn new(connection: Connection, deadline: Duration) -> Self {
        Self {
            connection,
            deadline,
            greeted: Cell::new(false),
            snapshot_sent: Cell::new(false),
            in_flight: Cell::new(false),
        }
    }

    pub fn hello(&self) -> Outcome {
        self.hello_with(HELLO)
    }

    /// Sends bytes that the agent has to accept as a hello.
    pub fn hello_with(&self, bytes: &[u8]) -> Outcome {
        self.greeted.set(true);
        self.send(bytes)
    }

    pub fn send(&self, bytes: &[u8]) -> Outcome {
        match self.connection.send(bytes, &[]) {
            Ok(()) => Ok(()),
            Err(error) => failed("a connection that stays", error.to_string()),
        }
    }

    pub fn next(&self) -> Outcome<Request> {
        self.next_within(self.deadline)
    }

    pub fn next_within(&self, time: Duration) -> Outcome<Request> {
        match self.within(time)? {
            Some(request) => Ok(request),
            None => failed(format!("a request within {time:?}"), "nothing"),
        }
    }

    pub fn within(&self, time: Duration) -> Outcome<Option<Request>> {
        match self.connection.receive(time)? {
            Incoming::Packet(packet) => self.inspect(packet).map(Some),
            Incoming::Silence => Ok(None),
            Incoming::End => failed("a connection that stays", "its end"),
        }
    }

    fn inspect(&self, packet: Packet) -> Outcome<Request> {
        let seen = packet.describe();
        check(self.greeted.get(), "A2: nothing before the hello", || {
            seen.clone()
        })?;
        check(!packet.bytes.is_empty(), "A7: no empty packet", || {
            seen.clone()
        })?;
        let fits = packet.bytes.len() <= MAX_REQUEST_BYTES;
        check(fits, "A7: no packet of more than 1024 bytes", || {
            seen.clone()
        })?;
        let in_flight = self.in_flight.replace(true);
        check(
            !in_flight,
            "A4: no request while another waits for its answer",
            || seen.clone(),
        )?;
        let request = WorkloadRequest::decode(&*packet.bytes).ok();
        let Some(payload) = request.and_then(|request| request.payload) else {
            return failed("A7: a request of ZDS", seen);
        };
        self.inspect_order(&payload)?;
        let descriptor = inspect_descriptors(&payload, packet.descriptors)?;
        Ok(Request {
            payload,
            descriptor,
        })
    }

    fn inspect_order(&self, payload: &Payload) -> Outcome {
        let after = self.snapshot_sent.get();
        match payload {
            Payload::Keep(_) => check(!after, "A9: no Keep after SnapshotSent", || {
                wire::describe(payload)
            }),
            Payload::SnapshotSent(_) => {
                self.snapshot_sent.set(true);
                check(!after, "A8: SnapshotSent once", || {
                    "a second one".to_owned()
                })
            }
            Payload::Add(add) => check(
                add.workload_info.is_some(),
                "A6: workload_info in every Add",
                || format!("an Add of {} without it", add.uid),
            ),
            Payload::Del(_) => Ok(()),
        }
    }

    /// Acknowledges the last request, and fails if another request arrived in the meantime.
    pub fn ack(&self) -> Outcome {
        self.answer(ACK)
    }

    pub fn nack(&self, error: &str) -> Outcome {
        self.answer(&wire::nack(error))
    }

    fn answer(&self, bytes: &[u8]) -> Outcome {
        self.within(GLANCE)?;
        self.in_flight.set(false);
        self.send(bytes)
    }

    pub fn ack_next(&self) -> Outcome<Request> {
        let request = self.next()?;
        self.ack()?;
        Ok(request)
    }

    /// Acknowledges all requests up to the end of the snapshot.
    pub fn snapshot(&self) -> Outcome<Vec<Request>> {
        let mut all = Vec::new();
        loop {
            let request = self.ack_next()?;
            if matches!(request.payload, Payload::SnapshotSent(_)) {
                return Ok(all);
            }
            all.push(request);
        }
    }

    /// Fails if the agent sends anything within `time`, or closes the connection.
    pub fn silent(&self, time: Duration) -> Outcome {
        match self.connection.receive(time)? {
            Incoming::Silence => Ok(()),
            Incoming::Packet(packet) => {
                let described = packet.describe();
                let request = self.inspect(packet)?;
                failed("no request", format!("{}, {described}", request.describe()))
            }
            Incoming::End => failed("a connection that stays", "its end"),
        }
    }

    /// Waits until the agent closes the connection, and checks earlier requests without answering them.
    pub fn ended(&self, within: Duration) -> Outcome {
        let end = Instant::now() + within;
        loop {
            match self
                .connection
                .receive(end.saturating_duration_since(Instant::now()))?
            {
                Incoming::End => return Ok(()),
                Incoming::Packet(packet) => drop(self.inspect(packet)?),
                Incoming::Silence => {
                    return failed(
                        format!("the end of the connection within {within:?}"),
                        "it stays",
                    );
                }
            }
        }
    }

    /// Closes only the sending side of the connection.
    pub fn half_close(&self) -> Outcome {
        Ok(self.connection.half_close()?)
    }

    pub fn snapshot_is_over(&self) -> bool {
        self.snapshot_sent.get()
    }

    pub fn pid(&self) -> Option<i32> {
        self.connection.peer()
    }
}

fn inspect_descriptors(
    payload: &Payload,
    mut descriptors: Vec<OwnedFd>,
) -> Outcome<Option<OwnedFd>> {
    let described = wire::describe(payload);
    let (expected, count) = match payload {
        Payload::Add(_) => ("A5: exactly one descriptor with an Add", 1),
        Payload::Keep(_) | Payload::Del(_) | Payload::SnapshotSent(_) => {
            ("A5: no descriptor with anything but an Add", 0)
        }
    };
    let seen = descriptors.len();
    check(seen == count, expected, || {
        format!("{described} with {seen}")
    })?;
    let Some(descriptor) = descriptors.pop() else {
        return Ok(None);
    };
    let link = fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
    let link = link.to_string_lossy();
    check(
        link.starts_with("net:["),
        "A5: a network namespace with an Add",
        || link.to_string(),
    )?;
    let flags = fcntl(descriptor.as_fd(), FcntlArg::F_GETFL).map_err(std::io::Error::from)?;
    let flags = OFlag::from_bits_retain(flags);
    let read_only = flags & (OFlag::O_ACCMODE | OFlag::O_PATH) == OFlag::O_RDONLY;
    check(
        read_only,
        "A5: a descriptor that was opened O_RDONLY",
        || format!("{flags:?}"),
    )?;
    Ok(Some(descriptor))
}
