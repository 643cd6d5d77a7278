//! The bench for ztunnels, which gives every case a new pair: a played agent under the control of the case, and the
//! ztunnel under test.

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

/// The time for watching a peer in which no packet may arrive.
pub const QUIET: Duration = Duration::from_millis(300);

#[derive(Clone, Debug)]
pub struct Setting {
    pub command: Vec<String>,
    pub socket: PathBuf,
    /// The directory for the ztunnel's files and output.
    pub directory: PathBuf,
    /// The time limit for each expected event.
    pub deadline: Duration,
    pub storm: usize,
    pub runtime: Handle,
}

/// The played agent, and the process of the ztunnel.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    listener: Option<Listener>,
    process: Option<Process>,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
}

impl Bench {
    pub fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            listener: None,
            process: None,
            notes: Vec::new(),
        }
    }

    pub fn deadline(&self) -> Duration {
        self.setting.deadline
    }

    pub fn storm(&self) -> usize {
        self.setting.storm
    }

    pub fn listen(&mut self) -> Outcome {
        let listener = Listener::bind(&self.setting.runtime, &self.setting.socket)?;
        self.listener = Some(listener);
        Ok(())
    }

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

    /// Starts agent and ztunnel; the ztunnel has connected, but the hello has not come yet.
    pub fn connected(&mut self) -> Outcome<Session> {
        self.listen()?;
        self.spawn()?;
        self.accept()
    }

    /// Starts agent and ztunnel, and receives the hello.
    pub fn greeted(&mut self) -> Outcome<Session> {
        let session = self.connected()?;
        session.hello()?;
        Ok(session)
    }

    /// Starts agent and ztunnel, and sends an empty snapshot.
    pub fn live(&mut self) -> Outcome<Session> {
        let session = self.greeted()?;
        session.ok(wire::snapshot_sent())?;
        Ok(session)
    }

    pub fn accept(&mut self) -> Outcome<Session> {
        self.accept_within(self.setting.deadline)
    }

    /// Waits for a connection for longer than the usual deadline.
    pub fn accept_within(&mut self, within: Duration) -> Outcome<Session> {
        let deadline = self.setting.deadline;
        let listener = self
            .listener
            .as_mut()
            .ok_or_else(|| Stop::Broken("no agent listens".into()))?;
        match listener.accept(within)? {
            Some(connection) => Ok(Session::new(connection, deadline)),
            None => failed(
                format!("a connection within {within:?}"),
                self.fate("no connection"),
            ),
        }
    }

    /// Waits for the next connection and its hello. A ztunnel has a second to connect again (Z14), so by default the
    /// connection has to come within five.
    pub fn reconnected(&mut self) -> Outcome<Session> {
        let session = self.accept_within(self.setting.deadline / 2)?;
        session.hello()?;
        Ok(session)
    }

    fn fate(&self, seen: &str) -> String {
        match self.process.as_ref().and_then(Process::ended) {
            Some(end) => format!("{seen}: the process ended with {end}"),
            None => seen.to_owned(),
        }
    }

    /// Returns the end of the process, if the process ends in time.
    pub fn await_end(&self, within: Duration) -> Option<String> {
        self.process.as_ref()?.await_end(within)
    }

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

    /// Fails unless the listeners of a pod are the same sockets as before.
    pub fn unchanged(&self, pod: &Netns, before: &[Listening], when: &str) -> Outcome {
        let now = self.served(pod, when)?;
        let expected = format!("the same listeners {when}: {before:?}");
        check(now == before, &expected, || format!("{now:?}"))
    }

    /// Fails unless the listeners of a pod close within the deadline.
    pub fn unserved(&self, pod: &Netns, when: &str) -> Outcome {
        let seen = pod.await_ports(&[], self.deadline())?;
        check(
            seen.is_empty(),
            &format!("no listeners in the pod {when}"),
            || format!("{seen:?}"),
        )
    }
}

pub fn dev_null() -> Outcome<File> {
    Ok(File::open(Path::new("/dev/null"))?)
}
