//! A connection of the ztunnel under test, as the agent observes the connection.

use std::{
    os::fd::BorrowedFd,
    thread,
    time::{Duration, Instant},
};

use prost::Message as _;
use zds_client::proto::{Version, ZdsHello, workload_request::Payload};

use crate::{
    case::{Outcome, Stop, failed},
    netns::Netns,
    process,
    wire::{self, Connection, Incoming},
};

/// The time without a change after which a number of descriptors is stable.
const SETTLED: Duration = Duration::from_millis(300);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Ok,
    /// The ztunnel did not carry out the request.
    Nack(String),
}

#[derive(Debug)]
pub struct Session {
    connection: Connection,
    deadline: Duration,
}

impl Session {
    /// Wraps a new connection before the first packet.
    pub fn new(connection: Connection, deadline: Duration) -> Self {
        Self {
            connection,
            deadline,
        }
    }

    /// Receives the hello of version 1, with or without unknown fields.
    pub fn hello(&self) -> Outcome {
        match self.connection.receive(self.deadline)? {
            Incoming::Packet(packet)
                if packet.descriptors.is_empty()
                    && ZdsHello::decode(&*packet.bytes)
                        .is_ok_and(|hello| hello.version() == Version::V1) =>
            {
                Ok(())
            }
            other @ (Incoming::Packet(_) | Incoming::End | Incoming::Silence) => failed(
                format!("the hello 08 01 first, within {:?}", self.deadline),
                other.describe(),
            ),
        }
    }

    pub fn ask(&self, payload: Payload, descriptors: &[BorrowedFd<'_>]) -> Outcome<Answer> {
        let name = wire::describe(&payload);
        self.ask_raw(&name, &wire::encode(payload), descriptors)
    }

    pub fn ask_raw(
        &self,
        name: &str,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Outcome<Answer> {
        self.send(name, bytes, descriptors)?;
        self.answer(name)
    }

    pub fn send(&self, name: &str, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Outcome {
        match self.connection.send(bytes, descriptors) {
            Ok(()) => Ok(()),
            Err(error) => failed(format!("a connection that takes {name}"), error.to_string()),
        }
    }

    pub fn answer(&self, name: &str) -> Outcome<Answer> {
        let expected = format!("one answer to {name} within {:?}", self.deadline);
        match self.connection.receive(self.deadline)? {
            Incoming::Packet(packet) if packet.descriptors.is_empty() => {
                match wire::answer(&packet.bytes) {
                    Some(error) if error.is_empty() => Ok(Answer::Ok),
                    Some(error) => Ok(Answer::Nack(error)),
                    None => failed(expected, packet.describe()),
                }
            }
            other @ (Incoming::Packet(_) | Incoming::End | Incoming::Silence) => {
                failed(expected, other.describe())
            }
        }
    }

    pub fn ok(&self, payload: Payload) -> Outcome {
        let name = wire::describe(&payload);
        match self.ask(payload, &[])? {
            Answer::Ok => Ok(()),
            Answer::Nack(error) => failed(
                format!("{name} is acknowledged"),
                format!("refused: {error}"),
            ),
        }
    }

    pub fn add(&self, uid: &str, pod: &Netns) -> Outcome {
        match self.ask(wire::add(uid), &[pod.descriptor()])? {
            Answer::Ok => Ok(()),
            Answer::Nack(error) => failed(
                format!("Add {uid} is acknowledged"),
                format!("refused: {error}"),
            ),
        }
    }

    /// Sends an Add, and fails unless the ztunnel refuses the pod as unservable.
    pub fn add_fails(&self, uid: &str, pod: &Netns) -> Outcome {
        let answer = self.ask(wire::add(uid), &[pod.descriptor()])?;
        answer.refused("failure to start proxy", &format!("Add {uid}"))
    }

    /// Fails if the ztunnel sends anything within `time`, or closes the connection.
    pub fn silent(&self, time: Duration) -> Outcome {
        match self.connection.receive(time)? {
            Incoming::Silence => Ok(()),
            other @ (Incoming::Packet(_) | Incoming::End) => failed(
                "not a word that was not asked for, on a connection that stays",
                other.describe(),
            ),
        }
    }

    /// Fails unless the ztunnel closes the connection without sending anything.
    pub fn ended(&self) -> Outcome {
        match self.connection.receive(self.deadline)? {
            Incoming::End => Ok(()),
            other @ (Incoming::Packet(_) | Incoming::Silence) => {
                failed("the end of the connection", other.describe())
            }
        }
    }

    pub fn half_close(&self) -> Outcome {
        Ok(self.connection.half_close()?)
    }

    pub fn descriptors(&self) -> Outcome<usize> {
        let unseen = || Stop::Skipped("the ztunnel's process cannot be seen from here".to_owned());
        process::descriptors(self.connection.peer().ok_or_else(unseen)?).map_err(|_| unseen())
    }

    /// Returns the number of descriptors once the number is stable: a ztunnel may open its own files after its hello.
    pub fn settled_descriptors(&self) -> Outcome<usize> {
        let end = Instant::now() + self.deadline;
        let (mut held, mut since) = (self.descriptors()?, Instant::now());
        while since.elapsed() < SETTLED && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
            let now = self.descriptors()?;
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        Ok(held)
    }

    /// Waits until the ztunnel has at most `most` descriptors; returns the last count.
    pub fn await_descriptors(&self, most: usize) -> Outcome<usize> {
        let end = Instant::now() + self.deadline;
        loop {
            let held = self.descriptors()?;
            if held <= most || Instant::now() >= end {
                return Ok(held);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Answer {
    /// Fails unless the answer is a refusal that begins with `prefix`.
    pub fn refused(&self, prefix: &str, name: &str) -> Outcome {
        let expected = format!("{name} is refused with \"{prefix}...\"");
        match self {
            Self::Nack(error) if error.starts_with(prefix) => Ok(()),
            Self::Nack(error) => failed(expected, format!("refused: {error}")),
            Self::Ok => failed(expected, "acknowledged"),
        }
    }
}
