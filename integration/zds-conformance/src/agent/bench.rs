//! The bench for agents: the agent under test, a driver, and pods. An agent with a command line is started anew for
//! every case.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Handle;

use super::{
    driver::{Adding, Driver, Place, Workload},
    peer::Peer,
};
use crate::{
    case::{Outcome, Stop, check, failed},
    netns::Netns,
    process::{Process, Start},
    wire::Connection,
};

/// The time for watching a peer in which no packet may arrive.
pub const QUIET: Duration = Duration::from_millis(400);

/// Extra time beyond the agent's own timeout.
const SLACK: Duration = Duration::from_secs(3);

#[derive(Clone, Debug)]
pub struct Setting {
    /// The command line of the agent; `None` if the agent is already running.
    pub command: Option<Vec<String>>,
    pub socket: PathBuf,
    /// The directory for the agent's files and output.
    pub directory: PathBuf,
    /// The time limit for each expected event.
    pub deadline: Duration,
    /// The agent's timeout for an answer and for a hello.
    pub ack_timeout: Duration,
    pub storm: usize,
    pub driver: Arc<dyn Driver>,
    pub runtime: Handle,
}

/// The agent under test with its process and its files.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    process: Option<Process>,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
}

/// A pod of a case, with its netns and the description for the agent.
#[derive(Debug)]
pub struct Pod {
    pub netns: Netns,
    pub workload: Workload,
}

impl Bench {
    pub fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            process: None,
            notes: Vec::new(),
        }
    }

    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    pub fn deadline(&self) -> Duration {
        self.setting.deadline
    }

    /// Returns the time by which the agent must have given up on a ztunnel.
    pub fn given_up(&self) -> Duration {
        self.setting.ack_timeout + SLACK
    }

    /// Starts the agent, and replaces a running agent. Fails if the kit has no command line of the agent.
    pub fn start(&mut self) -> Outcome {
        let Some(command) = &self.setting.command else {
            return Err(Stop::Skipped(
                "needs an agent that the kit starts: give its command after --".into(),
            ));
        };
        self.process = None;
        let log = self.setting.directory.join("agent.log");
        let start = Start {
            command,
            socket: &self.setting.socket,
            variable: None,
            directory: &self.setting.directory,
            log: &log,
        };
        self.process = Some(start.spawn()?);
        self.begin()
    }

    /// Kills the agent by SIGKILL, so that the agent cannot clean up.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn begin(&self) -> Outcome {
        let begun = self.setting.driver.begin(self.deadline());
        begun.map_err(|refusal| Stop::Broken(format!("the agent takes no calls: {refusal}")))
    }

    pub fn seeded<'a>(&mut self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        if self.setting.command.is_some() {
            self.start()?;
        }
        self.seed(pods)
    }

    pub fn seed<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        let all: Vec<_> = pods.into_iter().map(|pod| pod.workload.clone()).collect();
        let seeded = self.setting.driver.seed(&all);
        seeded
            .map_err(|refusal| Stop::Broken(format!("the agent does not take its set: {refusal}")))
    }

    pub fn connect(&self) -> Outcome<Peer> {
        let end = Instant::now() + self.deadline();
        loop {
            let connected =
                Connection::connect(&self.setting.runtime, &self.setting.socket, self.deadline());
            match connected {
                Ok(connection) => return Ok(Peer::new(connection, self.deadline())),
                Err(error) if Instant::now() >= end => {
                    let socket = self.setting.socket.display();
                    return failed(
                        format!("an agent that listens on {socket}"),
                        error.to_string(),
                    );
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    pub fn ztunnel(&self) -> Outcome<Peer> {
        let peer = self.connect()?;
        peer.hello()?;
        Ok(peer)
    }

    /// Starts an agent without pods, and a ztunnel with a complete snapshot.
    pub fn live(&mut self) -> Outcome<Peer> {
        self.seeded([])?;
        self.synced()
    }

    pub fn synced(&self) -> Outcome<Peer> {
        let ztunnel = self.ztunnel()?;
        ztunnel.snapshot()?;
        Ok(ztunnel)
    }

    pub fn pod(&self, uid: &str) -> Outcome<Pod> {
        let netns = Netns::make()?;
        let (device, inode) = netns.identity()?;
        let place = Place {
            path: netns.path(),
            device,
            inode,
        };
        let workload = Workload {
            uid: uid.to_owned(),
            namespace: "conformance".to_owned(),
            name: format!("name-of-{uid}"),
            service_account: "default".to_owned(),
            netns: Some(place),
        };
        Ok(Pod { netns, workload })
    }

    pub fn pods(&self, count: usize) -> Outcome<Vec<Pod>> {
        (0..count)
            .map(|number| self.pod(&format!("p{number}")))
            .collect()
    }

    /// Starts to add a pod; the caller waits as long as the agent may take.
    pub fn add(&self, pod: &Pod) -> Adding {
        self.add_within(pod, self.given_up() + self.deadline())
    }

    /// Starts to add a pod for a caller with the given deadline.
    pub fn add_within(&self, pod: &Pod, within: Duration) -> Adding {
        let (done, outcome) = mpsc::channel();
        let (driver, workload) = (Arc::clone(&self.setting.driver), pod.workload.clone());
        thread::spawn(move || done.send(driver.add(&workload, within)));
        Adding(outcome)
    }

    /// Adds a pod, and fails unless the add succeeds by the answer of some played ztunnel.
    pub fn added(&self, pod: &Pod) -> Outcome {
        self.succeeds(&self.add(pod), &pod.workload.uid)
    }

    pub fn succeeds(&self, adding: &Adding, uid: &str) -> Outcome {
        let expected = format!("the add of {uid} succeeds within {:?}", self.deadline());
        match adding.outcome(self.deadline()) {
            Some(Ok(())) => Ok(()),
            Some(Err(refusal)) => failed(expected, refusal),
            None => failed(expected, "no outcome"),
        }
    }

    /// Fails if the add has succeeded, or succeeds within `time`.
    pub fn not_credited(&self, adding: &Adding, time: Duration, why: &str) -> Outcome {
        let credited = matches!(adding.outcome(time), Some(Ok(())));
        check(
            !credited,
            &format!("A10: no success of an add {why}"),
            || "it succeeded".to_owned(),
        )
    }

    pub fn remove(&self, uid: &str) -> Outcome {
        match self.setting.driver.remove(uid) {
            Ok(()) => Ok(()),
            Err(refusal) => failed(format!("the removal of {uid}"), refusal),
        }
    }
}
