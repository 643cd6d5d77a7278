//! Starts and stops the processes of a node.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::Node;
use crate::{Access, TIMEOUT, bin, cgroups::host_cgroups, eventually, kubernetes};

impl Node {
    pub fn zds_socket(&self) -> PathBuf {
        self.dir.join("ztunnel/ztunnel.sock")
    }

    /// Starts a service that accepts any process with its own user id as a peer.
    pub fn start(&self, service: &str) -> anyhow::Result<()> {
        self.start_for("uid", service)
    }

    pub fn start_for(&self, peer: &str, service: &str) -> anyhow::Result<()> {
        self.start_with(service, &["--peer", peer])
    }

    /// Starts a service with settings, which include the policy for peers. By default the broker serves any ztunnel of
    /// its user.
    pub fn start_with(&self, service: &str, settings: &[&str]) -> anyhow::Result<()> {
        self.start_at(&self.run_dir(), service, settings)
    }

    pub fn start_at(&self, run_dir: &Path, service: &str, settings: &[&str]) -> anyhow::Result<()> {
        self.start_within(&[], run_dir, service, settings)
    }

    /// Starts a service through the command line `within`, which executes the command line after it.
    pub fn start_within(
        &self,
        within: &[&str],
        run_dir: &Path,
        service: &str,
        settings: &[&str],
    ) -> anyhow::Result<()> {
        let mut command = self.command(within, &bin(service)?);
        command.env("INPOD_HOST_CGROUPS", host_cgroups());
        self.spawn_service(command, run_dir, service, settings)
    }

    /// Starts a service of the previous release.
    pub fn start_previous(&self, service: &str) -> anyhow::Result<()> {
        let command = self.command(&[], &kubernetes::previous(service)?);
        self.spawn_service(command, &self.run_dir(), service, &["--peer", "uid"])
    }

    fn spawn_service(
        &self,
        mut command: Command,
        run_dir: &Path,
        service: &str,
        settings: &[&str],
    ) -> anyhow::Result<()> {
        command.arg("--run-dir").arg(run_dir);
        command.args(settings);
        command.args(["--log-format", "text"]);
        if !settings.contains(&"--log-level") {
            command.args(["--log-level", "debug"]);
        }
        match service {
            "pod-events" => {
                command.args(["--node-name", self.name()]);
                command.args(&self.pods_from);
                // On a real node pod-events may inherit proxy variables, which must not mislead it.
                for name in ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY"] {
                    command.env(name, "http://127.0.0.1:1");
                }
                command.arg("--plugin-state-dir").arg(self.state_dir());
                command.args([
                    "--propagation-wait-seconds",
                    "0",
                    "--drain-grace-seconds",
                    "30",
                ]);
            }
            "ztunnel-broker" => {
                command.arg("--zds-socket").arg(self.zds_socket());
                if !settings.contains(&"--ztunnel-peer") {
                    command.args(["--ztunnel-peer", "uid"]);
                }
            }
            _ => {}
        }
        self.spawn(service, command)
    }

    pub fn start_ztunnel(&self, arguments: &[&str]) -> anyhow::Result<()> {
        self.start_ztunnel_as("ztunnel", arguments)
    }

    /// Starts the reference ztunnel with a CA, so that the ztunnel speaks HBONE.
    pub fn start_hbone_ztunnel(&self) -> anyhow::Result<()> {
        self.start_ztunnel(&["--ca", &self.dir.display().to_string()])
    }

    /// Starts another reference ztunnel under its own name.
    pub fn start_ztunnel_as(&self, name: &str, arguments: &[&str]) -> anyhow::Result<()> {
        self.start_ztunnel_within(&[], name, arguments)
    }

    /// Starts a reference ztunnel that does not listen for DNS.
    pub fn start_ztunnel_without_dns(&self) -> anyhow::Result<()> {
        self.spawn_ztunnel(&[], "ztunnel", &[])
    }

    /// Starts a reference ztunnel with DNS, like the chart of stock ztunnel, through the command line `within`.
    pub fn start_ztunnel_within(
        &self,
        within: &[&str],
        name: &str,
        arguments: &[&str],
    ) -> anyhow::Result<()> {
        self.spawn_ztunnel(within, name, &[arguments, &["--dns"]].concat())
    }

    fn spawn_ztunnel(&self, within: &[&str], name: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(within, &bin("reference-ztunnel")?);
        let state = self.dir.join(format!("{name}.json"));
        // The state file of a killed ztunnel is outdated.
        fs::remove_file(&state).unwrap_or_default();
        command
            .arg("--uds")
            .arg(self.zds_socket())
            .arg("--access-log")
            .arg(self.access_log_of(name));
        command.arg("--status").arg(state).args(arguments);
        self.spawn(name, command)
    }

    pub fn access_log(&self) -> PathBuf {
        self.access_log_of("ztunnel")
    }

    fn access_log_of(&self, name: &str) -> PathBuf {
        let name = name.replace("ztunnel", "access");
        self.dir.join("log").join(name).with_extension("json")
    }

    pub fn ztunnel_state(&self) -> anyhow::Result<serde_json::Value> {
        self.ztunnel_state_of("ztunnel")
    }

    pub fn ztunnel_state_of(&self, name: &str) -> anyhow::Result<serde_json::Value> {
        let path = self.dir.join(format!("{name}.json"));
        Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
    }

    pub fn accesses(&self) -> anyhow::Result<Vec<Access>> {
        self.accesses_of("ztunnel")
    }

    pub fn accesses_of(&self, name: &str) -> anyhow::Result<Vec<Access>> {
        Access::read(&self.access_log_of(name))
    }

    fn command(&self, within: &[&str], program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.netns.path().display()))
            .args(within)
            .arg(program)
            .env_clear();
        command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null());
        command
    }

    /// Starts a program through the command line `within`.
    pub fn start_program(
        &self,
        within: &[&str],
        name: &str,
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, &Path)],
    ) -> anyhow::Result<()> {
        let mut command = self.command(within, program);
        command.args(arguments);
        command.envs(environment.iter().copied());
        self.spawn(name, command)
    }

    fn log(&self, process: &str) -> PathBuf {
        self.dir.join("log").join(process).with_extension("log")
    }

    fn spawn(&self, name: &str, mut command: Command) -> anyhow::Result<()> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log(name))?;
        command.stdout(log.try_clone()?).stderr(log);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        self.processes.borrow_mut().insert(name.to_owned(), child);
        Ok(())
    }

    pub fn stop(&self, name: &str, signal: Signal) -> anyhow::Result<()> {
        self.signal(name, signal)?;
        self.until_ended(name).map(drop)
    }

    /// Waits for the end of a process, and kills the process if it does not end in time.
    pub fn until_ended(&self, name: &str) -> anyhow::Result<ExitStatus> {
        let mut child = self
            .processes
            .borrow_mut()
            .remove(name)
            .with_context(|| format!("{name} does not run"))?;
        let ended = eventually(&format!("{name} ends"), TIMEOUT, || {
            child
                .try_wait()
                .map_err(anyhow::Error::from)?
                .context("it runs")
        });
        if ended.is_err() {
            child.kill()?;
        }
        ended
    }

    /// Sends a signal to a process. After SIGSTOP, returns once all threads have stopped.
    pub fn signal(&self, name: &str, signal: Signal) -> anyhow::Result<()> {
        let processes = self.processes.borrow();
        let child = processes
            .get(name)
            .with_context(|| format!("{name} does not run"))?;
        kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        if signal == Signal::SIGSTOP {
            let tasks = format!("/proc/{}/task", child.id());
            eventually("every thread stops", TIMEOUT, || all_stopped(&tasks))?;
        }
        Ok(())
    }

    /// Starts netconfig without the directory of network namespaces, as after a broken mount.
    pub fn start_netconfig_blind(&self) -> anyhow::Result<()> {
        let mut command = self.command(&[], Path::new("unshare"));
        let program = bin("netconfig")?;
        let (program, run_dir) = (program.display(), self.run_dir());
        let script = format!(
            "mount -t tmpfs none /run/netns && exec {program} --run-dir {} --peer uid",
            run_dir.display()
        );
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
        self.spawn("netconfig", command)
    }

    pub fn pid(&self, name: &str) -> anyhow::Result<u32> {
        let processes = self.processes.borrow();
        let child = processes.get(name);
        Ok(child.with_context(|| format!("{name} does not run"))?.id())
    }

    pub fn resident(&self, name: &str) -> anyhow::Result<u64> {
        self.kib(name, "VmRSS:")
    }

    /// Returns the memory of a process that the kernel cannot drop, in KiB.
    pub fn anonymous(&self, name: &str) -> anyhow::Result<u64> {
        self.kib(name, "RssAnon:")
    }

    /// Returns a line of the process's `/proc/PID/status`, in KiB.
    pub fn kib(&self, name: &str, kind: &str) -> anyhow::Result<u64> {
        let pid = self.pid(name)?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(kind));
        let line = line.with_context(|| format!("no {kind}"))?;
        Ok(line.trim().trim_end_matches("kB").trim().parse()?)
    }

    pub fn tail(&self, process: &str, lines: usize) -> String {
        let text = fs::read_to_string(self.log(process)).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..)
            .unwrap_or_default()
            .join("\n")
    }
}

/// Fails if a thread still runs: threads stop only after kill(2) has returned (proc_pid_stat(5): the state follows the
/// name).
fn all_stopped(tasks: &str) -> anyhow::Result<()> {
    for task in fs::read_dir(tasks)? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        ensure!(state.is_some_and(|state| state.starts_with('T')), "{stat}");
    }
    Ok(())
}
