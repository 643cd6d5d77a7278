//! An agent that does as a case says, and the ztunnel that it examines. Every case has a fresh one of both.

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

/// How long a peer is watched that is to do nothing.
pub const QUIET: Duration = Duration::from_millis(300);

/// What the cases are run with.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The ztunnel's command line.
    pub command: Vec<String>,
    /// The ZDS socket.
    pub socket: PathBuf,
    /// A directory for whatever the ztunnel writes, and for its output.
    pub directory: PathBuf,
    /// How long anything may take that has to happen.
    pub patience: Duration,
    /// How many pods make a storm.
    pub storm: usize,
    /// Where the sockets live.
    pub runtime: Handle,
}

/// See the module.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    listener: Option<Listener>,
    process: Option<Process>,
    /// What was seen that is neither right nor wrong.
    pub notes: Vec<String>,
}

impl Bench {
    /// A bench on which nothing runs yet.
    pub fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            listener: None,
            process: None,
            notes: Vec::new(),
        }
    }

    /// How long anything may take that has to happen.
    pub fn patience(&self) -> Duration {
        self.setting.patience
    }

    /// How many pods make a storm.
    pub fn storm(&self) -> usize {
        self.setting.storm
    }

    /// The agent listens.
    ///
    /// # Errors
    ///
    /// The socket's path cannot be used.
    pub fn listen(&mut self) -> Outcome {
        let listener = Listener::bind(&self.setting.runtime, &self.setting.socket)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// The agent is gone, and its socket with it.
    pub fn stop_listening(&mut self) {
        self.listener = None;
    }

    /// The ztunnel starts.
    ///
    /// # Errors
    ///
    /// It cannot be run.
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

    /// Both, and the ztunnel's connection, on which it has said nothing yet.
    ///
    /// # Errors
    ///
    /// It does not connect.
    pub fn connected(&mut self) -> Outcome<Session> {
        self.listen()?;
        self.spawn()?;
        self.accept()
    }

    /// Both, and a connection with the hello said.
    ///
    /// # Errors
    ///
    /// It does not come so far.
    pub fn greeted(&mut self) -> Outcome<Session> {
        let session = self.connected()?;
        session.hello()?;
        Ok(session)
    }

    /// Both, and a connection whose empty snapshot is over.
    ///
    /// # Errors
    ///
    /// It does not come so far.
    pub fn live(&mut self) -> Outcome<Session> {
        let session = self.greeted()?;
        session.ok(wire::snapshot_sent())?;
        Ok(session)
    }

    /// The next connection.
    ///
    /// # Errors
    ///
    /// None came in time.
    pub fn accept(&mut self) -> Outcome<Session> {
        let patience = self.setting.patience;
        let listener = self
            .listener
            .as_mut()
            .ok_or_else(|| Stop::Broken("no agent listens".into()))?;
        match listener.accept(patience)? {
            Some(connection) => Ok(Session::new(connection, patience)),
            None => failed(
                format!("a connection within {patience:?}"),
                self.fate("no connection"),
            ),
        }
    }

    /// The next connection and its hello.
    ///
    /// # Errors
    ///
    /// None came in time.
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

    /// How the process ended, if it does in that time.
    pub fn await_end(&self, within: Duration) -> Option<String> {
        self.process.as_ref()?.await_end(within)
    }

    /// A pod without a proxy.
    ///
    /// # Errors
    ///
    /// The machine has no room for it.
    pub fn pod(&self) -> Outcome<Netns> {
        Ok(Netns::make()?)
    }

    /// The listeners of a pod that is served, which have to be there now.
    ///
    /// # Errors
    ///
    /// One is missing, or there is one too many.
    pub fn served(&self, pod: &Netns, when: &str) -> Outcome<Vec<Listening>> {
        let seen = pod.ports()?;
        let expected = format!("listeners on {PORTS:?} in the pod {when}");
        check(seen == PORTS, &expected, || self.fate(&format!("{seen:?}")))?;
        Ok(pod.listening()?)
    }

    /// A pod's listeners are the same sockets as before.
    ///
    /// # Errors
    ///
    /// They are others, or gone.
    pub fn unchanged(&self, pod: &Netns, before: &[Listening], when: &str) -> Outcome {
        let now = self.served(pod, when)?;
        let expected = format!("the same listeners {when}: {before:?}");
        check(now == before, &expected, || format!("{now:?}"))
    }

    /// A pod has no listeners, at the latest in a while.
    ///
    /// # Errors
    ///
    /// It has.
    pub fn unserved(&self, pod: &Netns, when: &str) -> Outcome {
        let seen = pod.await_ports(&[], self.patience())?;
        check(
            seen.is_empty(),
            &format!("no listeners in the pod {when}"),
            || format!("{seen:?}"),
        )
    }
}

/// Something that is no netns.
///
/// # Errors
///
/// There is no `/dev/null`.
pub fn dev_null() -> Outcome<File> {
    Ok(File::open(Path::new("/dev/null"))?)
}
