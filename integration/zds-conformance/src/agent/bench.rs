//! The agent under test, with a driver and pods. If the kit starts the agent, every case gets a new one.

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

/// The time that the kit watches a peer that must do nothing.
pub const QUIET: Duration = Duration::from_millis(400);

/// Time that a case allows beyond the agent's own timeout.
const SLACK: Duration = Duration::from_secs(3);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The agent's command line; `None` if it is already running.
    pub command: Option<Vec<String>>,
    /// The agent's ZDS socket.
    pub socket: PathBuf,
    /// A directory for the agent's files and its output.
    pub directory: PathBuf,
    /// Deadline for anything that must happen.
    pub deadline: Duration,
    /// The agent's timeout for an answer and for a hello.
    pub ack_timeout: Duration,
    /// The number of pods in a storm.
    pub storm: usize,
    /// Adds and removes the agent's workloads.
    pub driver: Arc<dyn Driver>,
    /// The runtime of the sockets.
    pub runtime: Handle,
}

/// The agent under test, and the process and files that belong to it.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    process: Option<Process>,
    /// Observations that are neither right nor wrong.
    pub notes: Vec<String>,
}

/// A pod: its netns, and its description for the agent.
#[derive(Debug)]
pub struct Pod {
    pub netns: Netns,
    pub workload: Workload,
}

impl Bench {
    /// Creates a bench on which nothing runs yet.
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

    /// Returns the deadline for anything that must happen.
    pub fn deadline(&self) -> Duration {
        self.setting.deadline
    }

    /// Returns the time after which the agent must have given up on a ztunnel.
    pub fn given_up(&self) -> Duration {
        self.setting.ack_timeout + SLACK
    }

    /// Starts the agent, replacing a running one. Fails if the kit did not start that one.
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

    /// Kills the agent with SIGKILL, so that it cannot clean up.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn begin(&self) -> Outcome {
        let begun = self.setting.driver.begin(self.deadline());
        begun.map_err(|refusal| Stop::Broken(format!("the agent takes no calls: {refusal}")))
    }

    /// Starts an agent that knows exactly these pods.
    pub fn seeded<'a>(&mut self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        if self.setting.command.is_some() {
            self.start()?;
        }
        self.seed(pods)
    }

    /// Sends the running agent the whole set.
    pub fn seed<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        let all: Vec<_> = pods.into_iter().map(|pod| pod.workload.clone()).collect();
        let seeded = self.setting.driver.seed(&all);
        seeded
            .map_err(|refusal| Stop::Broken(format!("the agent does not take its set: {refusal}")))
    }

    /// Connects to the agent and sends nothing.
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

    /// Connects to the agent and sends the hello.
    pub fn ztunnel(&self) -> Outcome<Peer> {
        let peer = self.connect()?;
        peer.hello()?;
        Ok(peer)
    }

    /// Starts an agent without pods, and a ztunnel whose snapshot is complete.
    pub fn live(&mut self) -> Outcome<Peer> {
        self.seeded([])?;
        self.synced()
    }

    /// Connects a ztunnel and completes its snapshot.
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

    /// Creates pods `p0`, `p1` and so on.
    pub fn pods(&self, count: usize) -> Outcome<Vec<Pod>> {
        (0..count)
            .map(|number| self.pod(&format!("p{number}")))
            .collect()
    }

    /// Starts to add a pod; the caller waits as long as the agent may take.
    pub fn add(&self, pod: &Pod) -> Adding {
        let (done, outcome) = mpsc::channel();
        let (driver, workload) = (Arc::clone(&self.setting.driver), pod.workload.clone());
        let within = self.given_up() + self.deadline();
        thread::spawn(move || done.send(driver.add(&workload, within)));
        Adding(outcome)
    }

    /// Adds a pod that some ztunnel acknowledges by itself.
    pub fn added(&self, pod: &Pod) -> Outcome {
        self.succeeds(&self.add(pod), &pod.workload.uid)
    }

    /// Fails unless the add succeeds in time.
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
