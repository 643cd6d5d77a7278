//! What a kubelet does with the containers of a pod in its sandbox: init containers come first, one after the other, each
//! again until it has succeeded; of one that goes on running, a native sidecar, it is enough that it has started.

mod roles;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
};

use anyhow::{Context as _, ensure};
use integration::{PATIENCE, Pod, Spec, eventually, kubernetes::Image};

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

/// The port that a proxy's own init container calls, at which nothing listens.
const PROBE: u16 = 15002;

/// Where a pod stands after a round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// An init container has failed: nothing after it was started.
    Init {
        /// Its exit code.
        code: i32,
        /// Its last words.
        message: String,
    },
    /// Everything runs.
    Running,
}

impl Stage {
    /// How an init container failed, which must be so: its exit code and its last words.
    pub(crate) fn failure(self) -> (i32, String) {
        match self {
            Self::Init { code, message } => Some((code, message)),
            Self::Running => None,
        }
        .expect("everything runs")
    }
}

/// One container as it was started last.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) id: String,
    attempt: u32,
}

/// A pod with its containers.
#[derive(Debug)]
pub(crate) struct Resident<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) pod: Pod,
    shape: Shape,
    pub(crate) runs: BTreeMap<Role, Run>,
}

/// Gives a node the images that pods here are of.
pub(crate) fn import(runtime: &Runtime) {
    for (image, role) in [(VALIDATE, Role::Validation), (Image::Sidecar, Role::Proxy)] {
        let archive = image.write(&runtime.dir).unwrap();
        runtime.import(&archive, &role.image()).unwrap();
    }
    fs::create_dir_all(runtime.dir.join("log")).unwrap();
}

impl<'a> Resident<'a> {
    /// A pod's sandbox, whose addresses are shown, and none of its containers.
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

    /// The same, with all of its containers.
    pub(crate) fn running(runtime: &'a Runtime, shape: Shape, spec: Spec) -> anyhow::Result<Self> {
        let mut resident = Self::new(runtime, shape, spec)?;
        let stage = resident.sync()?;
        ensure!(stage == Stage::Running, "{stage:?}");
        Ok(resident)
    }

    /// One round: starts what is next until everything runs or an init container fails.
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

    /// Starts a container, whatever of the others runs.
    pub(crate) fn start(&mut self, role: Role) -> anyhow::Result<()> {
        let attempt = self.runs.get(&role).map_or(0, |run| run.attempt + 1);
        let words = self.last_words(role, attempt);
        // Every user may leave some (Kubernetes, `terminationMessagePath`).
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

    fn last_words(&self, role: Role, attempt: u32) -> PathBuf {
        let name = self.log_name(role, attempt);
        self.runtime
            .dir
            .join("log")
            .join(name)
            .with_extension("words")
    }

    /// Waits until a container has started, or ended if it is one that ends.
    pub(crate) fn settled(&self, role: Role) -> anyhow::Result<Stage> {
        if let Some(port) = role.listens() {
            let run = self.run(role)?;
            eventually("it listens", PATIENCE, || {
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
            message: fs::read_to_string(self.last_words(role, attempt))?,
        })
    }

    /// Waits for the end of a container.
    pub(crate) fn ended(&self, role: Role) -> anyhow::Result<Container> {
        let run = self.run(role)?;
        eventually("it ends", PATIENCE, || {
            let (container, _) = self.runtime.cri.container(&run.id)?;
            ensure!(container.state == 2, "{container:?}");
            anyhow::Ok(container)
        })
    }

    pub(crate) fn run(&self, role: Role) -> anyhow::Result<&Run> {
        self.runs.get(&role).context(role.name())
    }

    /// Which containers were ever started.
    pub(crate) fn started(&self) -> Vec<Role> {
        self.runs.keys().copied().collect()
    }

    /// Asks another pod's application, as a program in the application's container. What that saw of it.
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

    /// What a container has printed, a line each.
    fn log(&self, role: Role) -> anyhow::Result<Vec<String>> {
        let name = self.log_name(role, self.run(role)?.attempt);
        let text = fs::read_to_string(self.runtime.dir.join("log").join(name))?;
        // The runtime puts time, stream and a flag before each.
        let lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        Ok(lines.map(str::to_owned).collect())
    }

    /// The connections that its proxy has told of: source, destination, outcome. Those of the validation are none.
    pub(crate) fn connections(&self) -> anyhow::Result<Vec<(IpAddr, SocketAddr, String)>> {
        let lines = self.log(Role::Proxy)?;
        let told = lines.iter().filter(|line| *line != "listening");
        let all = told.map(|line| connection(line));
        let all = all.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(all.into_iter().filter(|it| it.1.port() != PROBE).collect())
    }

    /// The runtime's last word on it.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        Ok(self.runtime.end(&self.pod.container_id)?)
    }
}

/// What an application answered.
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

/// The manifest of a pod, as its status stands.
pub(crate) fn show(runtime: &Runtime, spec: &Spec, phase: &str) -> anyhow::Result<()> {
    let node = &runtime.node;
    let name = format!("{}-{}.yaml", spec.namespace, spec.name);
    let path = node.manifests().join(name);
    let text = spec.manifest(node.name());
    let text = text.replace("phase: Running", &format!("phase: {phase}"));
    fs::write(path.with_extension("tmp"), text)?;
    Ok(fs::rename(path.with_extension("tmp"), path)?)
}
