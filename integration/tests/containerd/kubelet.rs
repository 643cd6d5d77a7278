//! A kubelet's treatment of containers: init containers run one after another, each repeated until it succeeds; a
//! native sidecar need only have started.

mod roles;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
};

use anyhow::{Context as _, ensure};
use integration::{Pod, Spec, TIMEOUT, eventually, kubernetes::Image};

pub(crate) use self::roles::{Role, Shape};
use crate::{
    cri::{
        ImageSpec,
        containers::{Container, ContainerConfig, ContainerMetadata, LinuxContainer, Mount},
    },
    image,
    runtime::Runtime,
};
use roles::VALIDATE;

/// A proxy's own init container calls it, without a listener.
const PROBE: u16 = 15002;

/// The state of a pod after a round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing after this failed init container was started.
    Init {
        code: i32,
        message: String,
    },
    Running,
}

impl Stage {
    /// Returns exit code and termination message of a failed init container.
    pub(crate) fn failure(self) -> (i32, String) {
        match self {
            Self::Init { code, message } => Some((code, message)),
            Self::Running => None,
        }
        .expect("everything runs")
    }
}

/// A container's last start.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) id: String,
    attempt: u32,
}

#[derive(Debug)]
pub(crate) struct Resident<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) pod: Pod,
    shape: Shape,
    pub(crate) runs: BTreeMap<Role, Run>,
}

/// Imports the images of these pods on a node.
pub(crate) fn import(runtime: &Runtime) {
    for (image, role) in [(VALIDATE, Role::Validation), (Image::Sidecar, Role::Proxy)] {
        let archive = image.write(&runtime.dir).unwrap();
        runtime.import(&archive, &role.image()).unwrap();
    }
    fs::create_dir_all(runtime.dir.join("log")).unwrap();
}

impl<'a> Resident<'a> {
    /// Creates the sandbox without containers and shows its addresses.
    pub(crate) fn new(runtime: &'a Runtime, shape: Shape, spec: Spec) -> anyhow::Result<Self> {
        show(runtime, &spec, "Pending")?;
        let id = runtime.cri.run(runtime.config(&spec))?;
        let pod = runtime.sandbox(spec, &id)?;
        let spec = Spec {
            addresses: pod.addresses().into(),
            ..pod.spec.clone()
        };
        show(runtime, &spec, "Pending")?;
        Ok(Self {
            runtime,
            pod: Pod { spec, ..pod },
            shape,
            runs: BTreeMap::new(),
        })
    }

    /// Creates it with all containers.
    pub(crate) fn running(runtime: &'a Runtime, shape: Shape, spec: Spec) -> anyhow::Result<Self> {
        let mut resident = Self::new(runtime, shape, spec)?;
        let stage = resident.sync()?;
        ensure!(stage == Stage::Running, "{stage:?}");
        Ok(resident)
    }

    /// Starts what is next until everything runs or an init container fails.
    pub(crate) fn sync(&mut self) -> anyhow::Result<Stage> {
        for role in self.shape.order() {
            if self.is_done(*role)? {
                continue;
            }
            self.start(*role)?;
            let stage = self.settled(*role)?;
            if stage != Stage::Running {
                return Ok(stage);
            }
        }
        show(self.runtime, &self.pod.spec, "Running")?;
        Ok(Stage::Running)
    }

    fn is_done(&self, role: Role) -> anyhow::Result<bool> {
        let Some(run) = self.runs.get(&role) else {
            return Ok(false);
        };
        let (container, _) = self.runtime.cri.container(&run.id)?;
        Ok(container.state == 1 || (container.state == 2 && container.exit_code == 0))
    }

    pub(crate) fn start(&mut self, role: Role) -> anyhow::Result<()> {
        let attempt = self.runs.get(&role).map_or(0, |run| run.attempt + 1);
        let words = self.termination_message(role, attempt);
        // Any user may write (Kubernetes, `terminationMessagePath`).
        fs::write(&words, "")?;
        fs::set_permissions(&words, fs::Permissions::from_mode(0o666))?;
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: role.name().to_owned(),
                attempt,
            }),
            image: Some(ImageSpec {
                image: role.image(),
            }),
            command: owned(role.command()),
            args: owned(role.args()),
            mounts: vec![Mount {
                container_path: "/dev/termination-log".to_owned(),
                host_path: words.display().to_string(),
            }],
            log_path: self.log_name(role, attempt),
            linux: Some(LinuxContainer {
                security_context: Some(role.security()),
            }),
        };
        let (cri, sandbox) = (&self.runtime.cri, &self.pod.container_id);
        let sandbox_config = self.runtime.config(&self.pod.spec);
        let id = cri.start_container(sandbox, sandbox_config, config)?;
        self.runs.insert(role, Run { id, attempt });
        Ok(())
    }

    fn log_name(&self, role: Role, attempt: u32) -> String {
        format!("{}-{}-{attempt}.log", self.pod.spec.uid, role.name())
    }

    fn termination_message(&self, role: Role, attempt: u32) -> PathBuf {
        let name = self.log_name(role, attempt);
        self.runtime
            .dir
            .join("log")
            .join(name)
            .with_extension("words")
    }

    /// Waits until it has started, or has ended if it is not long-running.
    pub(crate) fn settled(&self, role: Role) -> anyhow::Result<Stage> {
        if let Some(port) = role.listens() {
            let run = self.run(role)?;
            eventually("it listens", TIMEOUT, || {
                let (container, _) = self.runtime.cri.container(&run.id)?;
                ensure!(container.state == 1, "{container:?} {:?}", self.log(role)?);
                let sockets = self.pod.exec(&["ss", "-Hltn"])?;
                ensure!(sockets.contains(&format!(":{port} ")), "{sockets}");
                anyhow::Ok(())
            })?;
            return Ok(Stage::Running);
        }
        let ended = self.ended(role)?;
        let attempt = self.run(role)?.attempt;
        if ended.exit_code == 0 {
            return Ok(Stage::Running);
        }
        Ok(Stage::Init {
            code: ended.exit_code,
            message: fs::read_to_string(self.termination_message(role, attempt))?,
        })
    }

    pub(crate) fn ended(&self, role: Role) -> anyhow::Result<Container> {
        let run = self.run(role)?;
        eventually("it ends", TIMEOUT, || {
            let (container, _) = self.runtime.cri.container(&run.id)?;
            ensure!(container.state == 2, "{container:?}");
            anyhow::Ok(container)
        })
    }

    pub(crate) fn run(&self, role: Role) -> anyhow::Result<&Run> {
        self.runs.get(&role).context(role.name())
    }

    pub(crate) fn started(&self) -> Vec<Role> {
        self.runs.keys().copied().collect()
    }

    /// Asks from the application's container; returns the source that the other saw.
    pub(crate) fn ask(&self, to: SocketAddr) -> anyhow::Result<IpAddr> {
        let url = format!("http://{to}{}", image::WHO);
        let command = ["/bin/busybox", "wget", "-O", "-", &url];
        let executed = self
            .runtime
            .cri
            .execute(&self.run(Role::App)?.id, &command)?;
        let error = String::from_utf8_lossy(&executed.stderr);
        let code = executed.exit_code;
        ensure!(code == 0, "{to}: {code} {error}");
        seen(&String::from_utf8_lossy(&executed.stdout))
    }

    fn log(&self, role: Role) -> anyhow::Result<Vec<String>> {
        let name = self.log_name(role, self.run(role)?.attempt);
        let text = fs::read_to_string(self.runtime.dir.join("log").join(name))?;
        // The runtime prefixes time, stream and a flag.
        let lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        Ok(lines.map(str::to_owned).collect())
    }

    /// Returns source, destination and outcome from the proxy's log, without the validation's.
    pub(crate) fn connections(&self) -> anyhow::Result<Vec<(IpAddr, SocketAddr, String)>> {
        let lines = self.log(Role::Proxy)?;
        let reported = lines.iter().filter(|line| *line != "listening");
        let all = reported.map(|line| connection(line));
        let all = all.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(all.into_iter().filter(|it| it.1.port() != PROBE).collect())
    }

    pub(crate) fn end(&self) -> anyhow::Result<()> {
        Ok(self.runtime.end(&self.pod.container_id)?)
    }
}

pub(crate) fn seen(body: &str) -> anyhow::Result<IpAddr> {
    let address = body.trim().trim_start_matches('[').trim_end_matches(']');
    let address: IpAddr = address.parse().with_context(|| format!("{body:?}"))?;
    Ok(address.to_canonical())
}

fn connection(line: &str) -> anyhow::Result<(IpAddr, SocketAddr, String)> {
    let mut words = line.split(' ');
    let mut word = || words.next().with_context(|| format!("{line:?}"));
    let source: SocketAddr = word()?.parse()?;
    Ok((source.ip(), word()?.parse()?, word()?.to_owned()))
}

/// Writes a pod's manifest with this phase.
pub(crate) fn show(runtime: &Runtime, spec: &Spec, phase: &str) -> anyhow::Result<()> {
    let node = &runtime.node;
    let name = format!("{}-{}.yaml", spec.namespace, spec.name);
    let path = node.manifests().join(name);
    let text = spec.manifest(node.name());
    let text = text.replace("phase: Running", &format!("phase: {phase}"));
    fs::write(path.with_extension("tmp"), text)?;
    Ok(fs::rename(path.with_extension("tmp"), path)?)
}
