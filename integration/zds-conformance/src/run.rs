use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use tokio::runtime::{Builder, Handle, Runtime};

use crate::{
    agent::{
        self,
        driver::{Driver, Exec, Inpod},
    },
    case::{Case, Listed, Profile, Record, Stop},
    netns::Netns,
    options::{DriverChoice, Options, Peer},
    report, ztunnel,
};

/// The reason why the kit could not run any case.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kit cannot create a network namespace.
    #[error(
        "needs root: it makes network namespaces for its pods, and this one cannot be made ({0})"
    )]
    NotRoot(io::Error),
    #[error("there is no case {0}: see --list")]
    NoSuchCase(String),
    /// The cases start the ztunnel, and therefore need its command line.
    #[error("needs the ztunnel's command after --")]
    NoCommand,
    /// The cases need a driver for the agent.
    #[error("needs --inpod DIR or --driver PROGRAM: how the agent is brought to add workloads")]
    NoDriver,
    /// The kit cannot know the socket of an agent that runs already, so `--socket` is required.
    #[error("needs --socket PATH where the agent runs already")]
    NoSocket,
    #[error("the driver: {0}")]
    Driver(String),
    /// A directory, a socket or the report could not be written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Runs the cases and reports each case as soon as it ends; with `--list` only lists the cases.
pub fn run(options: &Options, tell: impl Fn(&str)) -> Result<Vec<Record>, RunError> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let records = match &options.peer {
        Peer::Ztunnel => run_ztunnel(options, &runtime, &tell)?,
        Peer::Agent { .. } => run_agent(options, &runtime, &tell)?,
    };
    if let (Some(path), false) = (&options.json, options.list) {
        let peer = match options.peer {
            Peer::Ztunnel => "ztunnel",
            Peer::Agent { .. } => "agent",
        };
        report::write_json(path, peer, &records)?;
    }
    Ok(records)
}

/// Returns the chosen cases, or `None` after listing all cases.
fn chosen<B>(
    options: &Options,
    all: Vec<Listed<B>>,
    tell: &impl Fn(&str),
) -> Result<Option<Vec<Listed<B>>>, RunError> {
    if options.list {
        for listed in &all {
            let Case {
                name, about, rules, ..
            } = listed.case;
            let (profile, rules) = (listed.profile, rules.join(" "));
            let only = if listed.is_thorough {
                " (--thorough)"
            } else {
                ""
            };
            tell(&format!("{name:38} {profile:7} {about} [{rules}]{only}"));
        }
        return Ok(None);
    }
    let names: BTreeSet<_> = all.iter().map(|listed| listed.case.name).collect();
    if let Some(unknown) = options
        .cases
        .iter()
        .find(|name| !names.contains(name.as_str()))
    {
        return Err(RunError::NoSuchCase(unknown.clone()));
    }
    let wanted = |listed: &Listed<B>| {
        if options.cases.is_empty() {
            options.thorough || !listed.is_thorough
        } else {
            options.cases.iter().any(|name| name == listed.case.name)
        }
    };
    let chosen = all.into_iter().filter(wanted).collect();
    Netns::make().map_err(RunError::NotRoot)?;
    Ok(Some(chosen))
}

fn run_ztunnel(
    options: &Options,
    runtime: &Runtime,
    tell: &impl Fn(&str),
) -> Result<Vec<Record>, RunError> {
    let Some(cases) = chosen(options, ztunnel::cases(), tell)? else {
        return Ok(Vec::new());
    };
    if options.command.is_empty() {
        return Err(RunError::NoCommand);
    }
    let directory = Directory::new(options)?;
    ztunnel::network::write_workloads(&directory.path().join("workloads.yaml"))?;
    let setting = ztunnel::bench::Setting {
        command: options.command.clone(),
        socket: directory.socket.clone(),
        directory: directory.path().to_owned(),
        deadline: options.deadline,
        storm: options.storm,
        runtime: runtime.handle().clone(),
    };
    let all = cases.into_iter().map(|listed| {
        let mut bench = ztunnel::bench::Bench::new(&setting);
        let timed = timed(listed.case, &mut bench);
        let notes = std::mem::take(&mut bench.notes);
        drop(bench);
        conclude(&listed, timed, directory.notes(notes, "ztunnel.log"), tell)
    });
    Ok(all.collect())
}

fn run_agent(
    options: &Options,
    runtime: &Runtime,
    tell: &impl Fn(&str),
) -> Result<Vec<Record>, RunError> {
    let cases = Listed::all(Profile::Agent, agent::cases()).collect();
    let Some(cases) = chosen(options, cases, tell)? else {
        return Ok(Vec::new());
    };
    let Peer::Agent {
        ack_timeout,
        driver,
    } = &options.peer
    else {
        return Err(RunError::NoDriver);
    };
    let choice = driver.as_ref().ok_or(RunError::NoDriver)?;
    let started = !options.command.is_empty();
    if !started && options.socket.is_none() {
        return Err(RunError::NoSocket);
    }
    let directory = Directory::new(options)?;
    let driver = make_driver(runtime.handle(), choice)?;
    if !started {
        driver.begin(options.deadline).map_err(RunError::Driver)?;
    }
    let setting = agent::bench::Setting {
        command: started.then(|| options.command.clone()),
        socket: directory.socket.clone(),
        directory: directory.path().to_owned(),
        deadline: options.deadline,
        ack_timeout: *ack_timeout,
        storm: options.storm,
        driver,
        runtime: runtime.handle().clone(),
    };
    let all = cases.into_iter().map(|listed| {
        let mut bench = agent::bench::Bench::new(&setting);
        let timed = timed(listed.case, &mut bench);
        let notes = std::mem::take(&mut bench.notes);
        drop(bench);
        conclude(&listed, timed, directory.notes(notes, "agent.log"), tell)
    });
    Ok(all.collect())
}

fn make_driver(runtime: &Handle, choice: &DriverChoice) -> Result<Arc<dyn Driver>, RunError> {
    match choice {
        DriverChoice::Exec(program) => Ok(Arc::new(Exec::new(program))),
        DriverChoice::Inpod(directory) => {
            fs::create_dir_all(directory)?;
            Ok(Arc::new(
                Inpod::new(runtime, directory).map_err(RunError::Driver)?,
            ))
        }
    }
}

type Timed = (Result<(), Stop>, u128);

fn timed<B>(case: &Case<B>, bench: &mut B) -> Timed {
    let begun = Instant::now();
    let outcome = (case.run)(bench);
    (outcome, begun.elapsed().as_millis())
}

fn conclude<B>(
    listed: &Listed<B>,
    (outcome, milliseconds): Timed,
    notes: Notes,
    tell: &impl Fn(&str),
) -> Record {
    let troubled = matches!(outcome, Err(Stop::Failed { .. } | Stop::Broken(_)));
    let last_words = notes.last_words.into_iter().filter(|_| troubled);
    let notes = notes.seen.into_iter().chain(last_words).collect();
    let record = Record {
        name: listed.case.name,
        about: listed.case.about,
        rules: listed.case.rules,
        profile: listed.profile,
        outcome,
        notes,
        milliseconds,
    };
    tell(&report::lines(&record));
    record
}

struct Notes {
    seen: Vec<String>,
    last_words: Vec<String>,
}

const LAST_LINES: usize = 4;

struct Directory {
    own: tempfile::TempDir,
    socket: PathBuf,
}

impl Directory {
    fn new(options: &Options) -> io::Result<Self> {
        let private = fs::Permissions::from_mode(0o700);
        let own = tempfile::Builder::new()
            .prefix("zds-conformance-")
            .permissions(private)
            .tempdir()?;
        let socket = options
            .socket
            .clone()
            .unwrap_or_else(|| own.path().join("zds.sock"));
        Ok(Self { own, socket })
    }

    fn path(&self) -> &Path {
        self.own.path()
    }

    /// Collects the notes of the case that has just ended, and truncates the log.
    fn notes(&self, seen: Vec<String>, log: &str) -> Notes {
        let log = self.path().join(log);
        let text = fs::read(&log).unwrap_or_default();
        // If the peer was not started, there is no log.
        drop(fs::remove_file(log));
        let text = String::from_utf8_lossy(&text);
        let lines = text.lines().rev().take(LAST_LINES);
        let line = |line: &str| format!("log: {}", line.chars().take(300).collect::<String>());
        let mut last_words: Vec<_> = lines.map(line).collect();
        last_words.reverse();
        Notes { seen, last_words }
    }
}
