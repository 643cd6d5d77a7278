//! The agent that is examined, with a driver and pods. Where the kit starts it, every case has a fresh one.

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

/// How long a peer is watched that is to do nothing.
pub const QUIET: Duration = Duration::from_millis(400);

/// What a case allows beyond the agent's own timeout.
const SLACK: Duration = Duration::from_secs(3);

/// What the cases are run with.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The agent's command line; `None` where it runs already.
    pub command: Option<Vec<String>>,
    /// Its ZDS socket.
    pub socket: PathBuf,
    /// A directory for whatever it writes, and for its output.
    pub directory: PathBuf,
    /// How long anything may take that has to happen.
    pub patience: Duration,
    /// How long the agent waits for an answer and for a hello.
    pub ack_timeout: Duration,
    /// How many pods make a storm.
    pub storm: usize,
    /// How it is brought to add and remove workloads.
    pub driver: Arc<dyn Driver>,
    /// Where the sockets live.
    pub runtime: Handle,
}

/// See the module.
#[derive(Debug)]
pub struct Bench {
    setting: Setting,
    process: Option<Process>,
    /// What was seen that is neither right nor wrong.
    pub notes: Vec<String>,
}

/// A pod: a netns, and what the agent is told of it.
#[derive(Debug)]
pub struct Pod {
    /// Its netns.
    pub netns: Netns,
    /// What the agent is told.
    pub workload: Workload,
}

impl Bench {
    /// A bench on which nothing runs yet.
    pub fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            process: None,
            notes: Vec::new(),
        }
    }

    /// How the cases are run.
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// How long anything may take that has to happen.
    pub fn patience(&self) -> Duration {
        self.setting.patience
    }

    /// When the agent must have given up on a ztunnel, at the latest.
    pub fn given_up(&self) -> Duration {
        self.setting.ack_timeout + SLACK
    }

    /// Starts the agent, in place of the one that runs.
    ///
    /// # Errors
    ///
    /// It cannot be started, or is not ours to start.
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

    /// Kills the agent, so that it can put nothing in order.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn begin(&self) -> Outcome {
        let begun = self.setting.driver.begin(self.patience());
        begun.map_err(|refusal| Stop::Broken(format!("the agent takes no calls: {refusal}")))
    }

    /// An agent that knows exactly these pods.
    ///
    /// # Errors
    ///
    /// It cannot be had.
    pub fn seeded<'a>(&mut self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        if self.setting.command.is_some() {
            self.start()?;
        }
        self.seed(pods)
    }

    /// Tells the agent that runs the whole set.
    ///
    /// # Errors
    ///
    /// It refused it.
    pub fn seed<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) -> Outcome {
        let all: Vec<_> = pods.into_iter().map(|pod| pod.workload.clone()).collect();
        let seeded = self.setting.driver.seed(&all);
        seeded
            .map_err(|refusal| Stop::Broken(format!("the agent does not take its set: {refusal}")))
    }

    /// A connection on which nothing was said.
    ///
    /// # Errors
    ///
    /// The agent does not listen.
    pub fn connect(&self) -> Outcome<Peer> {
        let end = Instant::now() + self.patience();
        loop {
            let connected =
                Connection::connect(&self.setting.runtime, &self.setting.socket, self.patience());
            match connected {
                Ok(connection) => return Ok(Peer::new(connection, self.patience())),
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

    /// A ztunnel that has said hello.
    ///
    /// # Errors
    ///
    /// The agent does not take it.
    pub fn ztunnel(&self) -> Outcome<Peer> {
        let peer = self.connect()?;
        peer.hello()?;
        Ok(peer)
    }

    /// An agent without pods, and a ztunnel whose snapshot is over.
    ///
    /// # Errors
    ///
    /// It does not come so far.
    pub fn live(&mut self) -> Outcome<Peer> {
        self.seeded([])?;
        self.told()
    }

    /// A ztunnel whose snapshot is over.
    ///
    /// # Errors
    ///
    /// It does not come so far.
    pub fn told(&self) -> Outcome<Peer> {
        let ztunnel = self.ztunnel()?;
        ztunnel.snapshot()?;
        Ok(ztunnel)
    }

    /// A pod.
    ///
    /// # Errors
    ///
    /// The machine has no room for it.
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

    /// Pods `p0`, `p1` and so on.
    ///
    /// # Errors
    ///
    /// As [`Self::pod`].
    pub fn pods(&self, count: usize) -> Outcome<Vec<Pod>> {
        (0..count)
            .map(|number| self.pod(&format!("p{number}")))
            .collect()
    }

    /// Begins to add a pod; its caller waits for as long as the agent may take.
    pub fn add(&self, pod: &Pod) -> Adding {
        let (done, outcome) = mpsc::channel();
        let (driver, workload) = (Arc::clone(&self.setting.driver), pod.workload.clone());
        let within = self.given_up() + self.patience();
        thread::spawn(move || done.send(driver.add(&workload, within)));
        Adding(outcome)
    }

    /// Adds a pod that some ztunnel acknowledges by itself.
    ///
    /// # Errors
    ///
    /// It does not succeed.
    pub fn added(&self, pod: &Pod) -> Outcome {
        self.succeeds(&self.add(pod), &pod.workload.uid)
    }

    /// An add comes to a good end.
    ///
    /// # Errors
    ///
    /// It does not.
    pub fn succeeds(&self, adding: &Adding, uid: &str) -> Outcome {
        let expected = format!("the add of {uid} succeeds within {:?}", self.patience());
        match adding.outcome(self.patience()) {
            Some(Ok(())) => Ok(()),
            Some(Err(refusal)) => failed(expected, refusal),
            None => failed(expected, "no outcome"),
        }
    }

    /// An add has not succeeded, and does not in that time.
    ///
    /// # Errors
    ///
    /// It has.
    pub fn not_credited(&self, adding: &Adding, time: Duration, why: &str) -> Outcome {
        let credited = matches!(adding.outcome(time), Some(Ok(())));
        check(
            !credited,
            &format!("A10: no success of an add {why}"),
            || "it succeeded".to_owned(),
        )
    }

    /// Removes a pod.
    ///
    /// # Errors
    ///
    /// The agent refused it.
    pub fn remove(&self, uid: &str) -> Outcome {
        match self.setting.driver.remove(uid) {
            Ok(()) => Ok(()),
            Err(refusal) => failed(format!("the removal of {uid}"), refusal),
        }
    }
}
