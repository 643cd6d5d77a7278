//! A ztunnel's connection, as its agent sees it.

use std::{
    os::fd::BorrowedFd,
    thread,
    time::{Duration, Instant},
};

use zds_client::proto::workload_request::Payload;

use crate::{
    case::{Outcome, Stop, failed},
    netns::Netns,
    process,
    wire::{self, Connection, HELLO, Incoming},
};

/// What a ztunnel answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Ok,
    /// Not done, for this reason.
    Nack(String),
}

/// A ztunnel's connection.
#[derive(Debug)]
pub struct Session {
    connection: Connection,
    patience: Duration,
}

impl Session {
    /// A connection on which nothing was said yet.
    pub fn new(connection: Connection, patience: Duration) -> Self {
        Self {
            connection,
            patience,
        }
    }

    /// Waits for the hello.
    ///
    /// # Errors
    ///
    /// Something else came first, or nothing.
    pub fn hello(&self) -> Outcome {
        match self.connection.receive(self.patience)? {
            Incoming::Packet(packet) if packet.bytes == HELLO && packet.descriptors.is_empty() => {
                Ok(())
            }
            other @ (Incoming::Packet(_) | Incoming::End | Incoming::Silence) => failed(
                format!("the hello 08 01 first, within {:?}", self.patience),
                other.describe(),
            ),
        }
    }

    /// Sends one request and waits for its answer.
    ///
    /// # Errors
    ///
    /// There was none, or something else.
    pub fn ask(&self, payload: Payload, descriptors: &[BorrowedFd<'_>]) -> Outcome<Answer> {
        let name = wire::describe(&payload);
        self.ask_raw(&name, &wire::encode(payload), descriptors)
    }

    /// The same for any bytes.
    ///
    /// # Errors
    ///
    /// As [`Self::ask`].
    pub fn ask_raw(
        &self,
        name: &str,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Outcome<Answer> {
        self.send(name, bytes, descriptors)?;
        self.answer(name)
    }

    /// Sends without waiting.
    ///
    /// # Errors
    ///
    /// The ztunnel has closed the connection.
    pub fn send(&self, name: &str, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Outcome {
        match self.connection.send(bytes, descriptors) {
            Ok(()) => Ok(()),
            Err(error) => failed(format!("a connection that takes {name}"), error.to_string()),
        }
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    ///
    /// There was none, or something else.
    pub fn answer(&self, name: &str) -> Outcome<Answer> {
        let expected = format!("one answer to {name} within {:?}", self.patience);
        match self.connection.receive(self.patience)? {
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

    /// A request that has to be carried out.
    ///
    /// # Errors
    ///
    /// It was refused, or not answered.
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

    /// An Add that has to be carried out.
    ///
    /// # Errors
    ///
    /// It was refused, or not answered.
    pub fn add(&self, uid: &str, pod: &Netns) -> Outcome {
        match self.ask(wire::add(uid), &[pod.descriptor()])? {
            Answer::Ok => Ok(()),
            Answer::Nack(error) => failed(
                format!("Add {uid} is acknowledged"),
                format!("refused: {error}"),
            ),
        }
    }

    /// An Add of a pod that cannot be served.
    ///
    /// # Errors
    ///
    /// It was carried out, or refused as something else.
    pub fn add_fails(&self, uid: &str, pod: &Netns) -> Outcome {
        let answer = self.ask(wire::add(uid), &[pod.descriptor()])?;
        answer.refused("failure to start proxy", &format!("Add {uid}"))
    }

    /// The ztunnel says nothing.
    ///
    /// # Errors
    ///
    /// It said something, or hung up.
    pub fn silent(&self, time: Duration) -> Outcome {
        match self.connection.receive(time)? {
            Incoming::Silence => Ok(()),
            other @ (Incoming::Packet(_) | Incoming::End) => failed(
                "not a word that was not asked for, on a connection that stays",
                other.describe(),
            ),
        }
    }

    /// The ztunnel closes the connection.
    ///
    /// # Errors
    ///
    /// It does not, or says something before.
    pub fn ended(&self) -> Outcome {
        match self.connection.receive(self.patience)? {
            Incoming::End => Ok(()),
            other @ (Incoming::Packet(_) | Incoming::Silence) => {
                failed("the end of the connection", other.describe())
            }
        }
    }

    /// The agent sends no more.
    ///
    /// # Errors
    ///
    /// The connection is gone.
    pub fn half_close(&self) -> Outcome {
        Ok(self.connection.half_close()?)
    }

    /// How many descriptors the ztunnel holds.
    ///
    /// # Errors
    ///
    /// It cannot be seen.
    pub fn descriptors(&self) -> Outcome<usize> {
        let unseen = || Stop::Skipped("the ztunnel's process cannot be seen from here".to_owned());
        process::descriptors(self.connection.peer().ok_or_else(unseen)?).map_err(|_| unseen())
    }

    /// Waits until the ztunnel holds no more descriptors than that; gives how many it held at last.
    ///
    /// # Errors
    ///
    /// As [`Self::descriptors`].
    pub fn await_descriptors(&self, most: usize) -> Outcome<usize> {
        let end = Instant::now() + self.patience;
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
    /// It was refused in those words.
    ///
    /// # Errors
    ///
    /// It was not.
    pub fn refused(&self, prefix: &str, name: &str) -> Outcome {
        let expected = format!("{name} is refused with \"{prefix}...\"");
        match self {
            Self::Nack(error) if error.starts_with(prefix) => Ok(()),
            Self::Nack(error) => failed(expected, format!("refused: {error}")),
            Self::Ok => failed(expected, "acknowledged"),
        }
    }
}
