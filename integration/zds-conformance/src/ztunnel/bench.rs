//! An agent that a case controls, and the ztunnel under test. Every case has a new pair.

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::runtime::Handle;

use super::session::Session;
use crate::{
    case::{Outcome, Stop, check, failed},
    netns::{Listening, Netns, PORTS},
    process::{Process, Start},
    wire::{self, Listener},
};

/// The time that the kit watches a peer that must do nothing.
pub const QUIET: Duration = Duration::from_millis(300);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct Setting {
    pub command: Vec<String>,
    pub socket: PathBuf,
    /// A directory for the ztunnel's files and its output.
    pub directory: PathBuf,
    /// Deadline for anything that must happen.
    pub deadline: Duration,
    /// The number of pods in a storm.
    pub storm: usize,
    /// The runtime of the sockets.
    pub runtime: Handle,
}

/// The agent that the kit plays, and the ztunnel's process.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    listener: Option<Listener>,
    process: Option<Process>,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
}

impl Bench {
    /// Creates a bench on which nothing runs yet.
    pub fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            listener: None,
            process: None,
            notes: Vec::new(),
        }
    }

    /// Returns the deadline for anything that must happen.
    pub fn deadline(&self) -> Duration {
        self.setting.deadline
    }

    /// Returns the number of pods in a storm.
    pub fn storm(&self) -> usize {
        self.setting.storm
    }

    /// Starts to listen as the agent.
    pub fn listen(&mut self) -> Outcome {
        let listener = Listener::bind(&self.setting.runtime, &self.setting.socket)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Closes and removes the agent's socket.
    pub fn stop_listening(&mut self) {
        self.listener = None;
    }

    pub fn spawn(&mut self) -> Outcome {
        let log = self.setting.directory.join("ztunnel.log");
        let start = Start {
            command: &self.setting.command,
            socket: &self.setting.socket,
            variable: Some("INPOD_UDS"),
            directory: &self.setting.directory,
            log: &log,
        };
        self.process = Some(start.spawn()?);
        Ok(())
    }

    /// Starts both and returns the ztunnel's connection before its hello.
    pub fn connected(&mut self) -> Outcome<Session> {
        self.listen()?;
        self.spawn()?;
        self.accept()
    }

    /// Starts both and returns the connection after the hello.
    pub fn greeted(&mut self) -> Outcome<Session> {
        let session = self.connected()?;
        session.hello()?;
        Ok(session)
    }

    /// Starts both and returns the connection after an empty snapshot.
    pub fn live(&mut self) -> Outcome<Session> {
        let session = self.greeted()?;
        session.ok(wire::snapshot_sent())?;
        Ok(session)
    }

    /// Waits for the next connection.
    pub fn accept(&mut self) -> Outcome<Session> {
        let deadline = self.setting.deadline;
        let listener = self
            .listener
            .as_mut()
            .ok_or_else(|| Stop::Broken("no agent listens".into()))?;
        match listener.accept(deadline)? {
            Some(connection) => Ok(Session::new(connection, deadline)),
            None => failed(
                format!("a connection within {deadline:?}"),
                self.fate("no connection"),
            ),
        }
    }

    /// Waits for the next connection and its hello.
    pub fn reconnected(&mut self) -> Outcome<Session> {
        let session = self.accept()?;
        session.hello()?;
        Ok(session)
    }

    fn fate(&self, seen: &str) -> String {
        match self.process.as_ref().and_then(Process::ended) {
            Some(end) => format!("{seen}: the process ended with {end}"),
            None => seen.to_owned(),
        }
    }

    /// Returns how the process ended, if it does in time.
    pub fn await_end(&self, within: Duration) -> Option<String> {
        self.process.as_ref()?.await_end(within)
    }

    /// Creates a pod without a proxy.
    pub fn pod(&self) -> Outcome<Netns> {
        Ok(Netns::make()?)
    }

    /// Returns the listeners of a served pod, which must exist now.
    pub fn served(&self, pod: &Netns, when: &str) -> Outcome<Vec<Listening>> {
        let seen = pod.ports()?;
        let expected = format!("listeners on {PORTS:?} in the pod {when}");
        check(seen == PORTS, &expected, || self.fate(&format!("{seen:?}")))?;
        Ok(pod.listening()?)
    }

    /// Fails unless a pod's listeners are the same sockets as before.
    pub fn unchanged(&self, pod: &Netns, before: &[Listening], when: &str) -> Outcome {
        let now = self.served(pod, when)?;
        let expected = format!("the same listeners {when}: {before:?}");
        check(now == before, &expected, || format!("{now:?}"))
    }

    /// Fails unless a pod's listeners are closed within the deadline.
    pub fn unserved(&self, pod: &Netns, when: &str) -> Outcome {
        let seen = pod.await_ports(&[], self.deadline())?;
        check(
            seen.is_empty(),
            &format!("no listeners in the pod {when}"),
            || format!("{seen:?}"),
        )
    }
}

/// Opens a file that is not a netns.
pub fn dev_null() -> Outcome<File> {
    Ok(File::open(Path::new("/dev/null"))?)
}
