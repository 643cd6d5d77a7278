//! A node whose broker identifies ztunnels by their pods, with processes in pods.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, ensure};
use integration::{Cgroups, Node, SERVICES, Spec, TIMEOUT, ZTUNNEL_CAPABILITIES, bin, eventually};

pub(crate) const ZTUNNEL: &str = "11111111-2222-3333-4444-555555555555";
pub(crate) const OTHER: &str = "66666666-7777-8888-9999-aaaaaaaaaaaa";
const AGENT: &str = "bbbbbbbb-cccc-dddd-eeee-ffffffffffff";

static NEXT: AtomicU32 = AtomicU32::new(1);

/// The node is dropped before its cgroups.
pub(crate) struct Scene {
    pub(crate) node: Node,
    pub(crate) cgroups: Cgroups,
}

impl Scene {
    /// The broker has its defaults; no ztunnel pod is known yet.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let scene = Self::without_services()?;
        for service in SERVICES {
            scene.start(service)?;
        }
        Ok(scene)
    }

    pub(crate) fn without_services() -> anyhow::Result<Self> {
        let cgroups = Cgroups::new().context("these tests make cgroups: run them as root")?;
        let node = Node::new()?;
        Ok(Self { node, cgroups })
    }

    /// Has an up-to-date ztunnel that serves a pod.
    pub(crate) fn served() -> anyhow::Result<Self> {
        let scene = Self::new()?;
        scene.write_ztunnel_manifest()?;
        scene.start_ztunnel("ztunnel")?;
        scene.node.ready()?;
        scene.node.pod(Spec::new("victim").ambient())?;
        Ok(scene)
    }

    pub(crate) fn start(&self, service: &str) -> anyhow::Result<()> {
        if service != "ztunnel-broker" {
            return self.node.start(service);
        }
        // In its own pod, as on a node.
        let within = self.cgroups.container(AGENT, "", "-all")?;
        let within: Vec<&str> = within.iter().map(String::as_str).collect();
        let settings = ["--peer", "uid", "--ztunnel-peer", "pod"];
        let run_dir = self.node.run_dir();
        self.node
            .start_within(&within, &run_dir, service, &settings)
    }

    pub(crate) fn write_ztunnel_manifest(&self) -> anyhow::Result<()> {
        self.node.write_manifest(&Spec {
            namespace: "istio-system".to_owned(),
            name: "ztunnel".to_owned(),
            uid: ZTUNNEL.to_owned(),
            mode: None,
            ..Spec::new("ztunnel")
        })
    }

    /// Starts the reference ztunnel as a stock one runs.
    pub(crate) fn start_ztunnel(&self, name: &str) -> anyhow::Result<()> {
        let within = self.cgroups.container(ZTUNNEL, "", ZTUNNEL_CAPABILITIES)?;
        let within: Vec<&str> = within.iter().map(String::as_str).collect();
        self.node.start_ztunnel_within(&within, name, &[])
    }

    /// Another program execs the impostor.
    pub(crate) fn impostor(&self, within: &[String], does: &[&str]) -> anyhow::Result<Impostor> {
        let name = format!("impostor-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let output = self.node.run_dir().with_file_name(name);
        let program = bin("impostor")?.display().to_string();
        let mut command = within.to_vec();
        command.push(program);
        let (program, arguments) = command.split_first().context("a program")?;
        let (verb, rest) = does.split_first().context("a verb")?;
        let child = Command::new(program)
            .args(arguments)
            .arg(verb)
            .arg(self.node.zds_socket())
            .args(rest)
            .stdin(Stdio::null())
            .stdout(File::create(&output)?)
            .spawn()?;
        let impostor = Impostor { child, output };
        eventually("it connects", TIMEOUT, || {
            // An impostor's heir announces its handover.
            let has_begun = impostor.said().starts_with("connected") || *verb == "hand-over";
            ensure!(has_begun, "{}", impostor.said());
            anyhow::Ok(())
        })?;
        Ok(impostor)
    }

    /// Returns the broker's log lines about connections that it refused.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let log = self.node.tail("ztunnel-broker", 100_000);
        let refused = log
            .lines()
            .filter(|line| line.contains("WARN audit: Refused a connection to ZDS"));
        refused.map(str::to_owned).collect()
    }
}

/// A process that is no ztunnel, killed on drop.
pub(crate) struct Impostor {
    child: Child,
    output: PathBuf,
}

impl Impostor {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its report of what it received.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// Expects that its connection ended without receiving anything.
    pub(crate) fn assert_refused(&self) -> anyhow::Result<()> {
        eventually("it is sent away", TIMEOUT, || {
            let said = self.said();
            ensure!(said == "connected\nend\n", "{said}");
            anyhow::Ok(())
        })
    }

    /// Waits until it received something, as a ztunnel does.
    pub(crate) fn until_given_something(&self) -> anyhow::Result<()> {
        eventually("it is given something", TIMEOUT, || {
            let said = self.said();
            ensure!(said.starts_with("connected\ngiven "), "{said}");
            anyhow::Ok(())
        })
    }

    pub(crate) fn ended(&mut self) -> anyhow::Result<()> {
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        // It has ended already, or ends now.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}
