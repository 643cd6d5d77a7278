//! A ztunnel that does as a case says, and looks at every packet by the rules that hold for all of them.

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
    wire::{self, ACK, Connection, HELLO, Incoming, LONGEST, Packet},
};

/// How long a second request is looked for before an answer.
const GLANCE: Duration = Duration::from_millis(2);

/// A request that kept the rules which hold for each.
#[derive(Debug)]
pub struct Said {
    /// What was said.
    pub payload: Payload,
    /// The descriptor of an Add.
    pub descriptor: Option<OwnedFd>,
}

impl Said {
    /// In a few words.
    pub fn words(&self) -> String {
        wire::describe(&self.payload)
    }

    /// The pod that it names.
    pub fn uid(&self) -> Option<&str> {
        match &self.payload {
            Payload::Add(add) => Some(&add.uid),
            Payload::Keep(keep) => Some(&keep.uid),
            Payload::Del(del) => Some(&del.uid),
            Payload::SnapshotSent(_) => None,
        }
    }

    /// It is that request.
    ///
    /// # Errors
    ///
    /// It is another one.
    pub fn is(&self, words: &str) -> Outcome {
        check(self.words() == words, words, || self.words())
    }

    /// It is an Add of that netns.
    ///
    /// # Errors
    ///
    /// It is something else, or of another netns.
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

/// See the module.
#[derive(Debug)]
pub struct Peer {
    connection: Connection,
    patience: Duration,
    greeted: Cell<bool>,
    snapshot_sent: Cell<bool>,
    in_flight: Cell<bool>,
}

impl Peer {
    /// A connection on which nothing was said yet.
    pub fn new(connection: Connection, patience: Duration) -> Self {
        Self {
            connection,
            patience,
            greeted: Cell::new(false),
            snapshot_sent: Cell::new(false),
            in_flight: Cell::new(false),
        }
    }

    /// Says hello.
    ///
    /// # Errors
    ///
    /// The agent has hung up.
    pub fn hello(&self) -> Outcome {
        self.greeted.set(true);
        self.send(HELLO)
    }

    /// Sends any bytes.
    ///
    /// # Errors
    ///
    /// The agent has hung up.
    pub fn send(&self, bytes: &[u8]) -> Outcome {
        match self.connection.send(bytes, &[]) {
            Ok(()) => Ok(()),
            Err(error) => failed("a connection that stays", error.to_string()),
        }
    }

    /// The next request, which is due.
    ///
    /// # Errors
    ///
    /// There is none, or one against the rules.
    pub fn next(&self) -> Outcome<Said> {
        self.next_within(self.patience)
    }

    /// The next request, which is due in that time.
    ///
    /// # Errors
    ///
    /// There is none, or one against the rules.
    pub fn next_within(&self, time: Duration) -> Outcome<Said> {
        match self.within(time)? {
            Some(said) => Ok(said),
            None => failed(format!("a request within {time:?}"), "nothing"),
        }
    }

    /// The next request, if one comes in that time.
    ///
    /// # Errors
    ///
    /// The connection ended, or what came is against the rules.
    pub fn within(&self, time: Duration) -> Outcome<Option<Said>> {
        match self.connection.receive(time)? {
            Incoming::Packet(packet) => self.inspect(packet).map(Some),
            Incoming::Silence => Ok(None),
            Incoming::End => failed("a connection that stays", "its end"),
        }
    }

    /// What holds for every packet.
    fn inspect(&self, packet: Packet) -> Outcome<Said> {
        let seen = packet.describe();
        check(self.greeted.get(), "A2: nothing before the hello", || {
            seen.clone()
        })?;
        check(!packet.bytes.is_empty(), "A7: no empty packet", || {
            seen.clone()
        })?;
        let fits = packet.bytes.len() <= LONGEST;
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
        Ok(Said {
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

    /// Answers the request.
    ///
    /// # Errors
    ///
    /// There was another one meanwhile, or the agent has hung up.
    pub fn ack(&self) -> Outcome {
        self.answer(ACK)
    }

    /// Refuses the request.
    ///
    /// # Errors
    ///
    /// As [`Self::ack`].
    pub fn nack(&self, error: &str) -> Outcome {
        self.answer(&wire::nack(error))
    }

    fn answer(&self, bytes: &[u8]) -> Outcome {
        self.within(GLANCE)?;
        self.in_flight.set(false);
        self.send(bytes)
    }

    /// The next request, answered.
    ///
    /// # Errors
    ///
    /// As [`Self::next`] and [`Self::ack`].
    pub fn ack_next(&self) -> Outcome<Said> {
        let said = self.next()?;
        self.ack()?;
        Ok(said)
    }

    /// Everything up to the end of the snapshot, answered.
    ///
    /// # Errors
    ///
    /// It does not end, or something was against the rules.
    pub fn snapshot(&self) -> Outcome<Vec<Said>> {
        let mut all = Vec::new();
        loop {
            let said = self.ack_next()?;
            if matches!(said.payload, Payload::SnapshotSent(_)) {
                return Ok(all);
            }
            all.push(said);
        }
    }

    /// The agent says nothing.
    ///
    /// # Errors
    ///
    /// It says something, or hangs up.
    pub fn silent(&self, time: Duration) -> Outcome {
        match self.connection.receive(time)? {
            Incoming::Silence => Ok(()),
            Incoming::Packet(packet) => {
                let described = packet.describe();
                let said = self.inspect(packet)?;
                failed("no request", format!("{}, {described}", said.words()))
            }
            Incoming::End => failed("a connection that stays", "its end"),
        }
    }

    /// The agent hangs up; what it says before is looked at and not answered.
    ///
    /// # Errors
    ///
    /// It does not.
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

    /// Sends no more, but still receives.
    ///
    /// # Errors
    ///
    /// The connection is gone.
    pub fn half_close(&self) -> Outcome {
        Ok(self.connection.half_close()?)
    }

    /// Whether its snapshot has ended.
    pub fn snapshot_is_over(&self) -> bool {
        self.snapshot_sent.get()
    }

    /// The agent's process.
    pub fn pid(&self) -> Option<i32> {
        self.connection.peer()
    }
}

fn inspect_descriptors(
    payload: &Payload,
    mut descriptors: Vec<OwnedFd>,
) -> Outcome<Option<OwnedFd>> {
    let words = wire::describe(payload);
    let (expected, count) = match payload {
        Payload::Add(_) => ("A5: exactly one descriptor with an Add", 1),
        Payload::Keep(_) | Payload::Del(_) | Payload::SnapshotSent(_) => {
            ("A5: no descriptor with anything but an Add", 0)
        }
    };
    let seen = descriptors.len();
    check(seen == count, expected, || format!("{words} with {seen}"))?;
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
