//! Binds in a real containerd's sandboxes are reported without executing anything in a container.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{Bind, BindKind, ListBindsRequest, PodBinds, PortBinds};
use integration::{Pod, Spec, TIMEOUT, eventually, not_run, run};

use crate::{image, runtime::Runtime};

/// Debian's PostgreSQL; its subdirectories are versions.
const POSTGRES: &str = "/usr/lib/postgresql";

/// Reports the only pod, which must have been inspected.
fn report(runtime: &Runtime) -> anyhow::Result<PodBinds> {
    let mut pods = runtime.node.api().binds(ListBindsRequest::default())?;
    let pod = pods.pop().context("no pod")?;
    ensure!(pods.is_empty() && pod.failure.is_none(), "{pods:?} {pod:?}");
    Ok(pod)
}

/// Waits until exactly these ports are bound in these ways.
fn until_bound(runtime: &Runtime, wanted: &[(u32, BindKind)]) {
    eventually("it is reported", TIMEOUT, || {
        let pod = report(runtime)?;
        let found: Vec<_> = pod.ports.iter().map(|it| (it.port, it.kind())).collect();
        ensure!(found == wanted, "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Runs a program of the image in its own container, in a pod's network.
fn contained(runtime: &Runtime, pod: &Pod, id: &str, command: &[&str]) {
    let network = format!("network:{}", pod.path().display());
    let cgroup = format!("/binds-{}/{id}", std::process::id());
    let flags = ["run", "-d", "--snapshotter", "native", "--cgroup", &cgroup];
    let rest = ["--with-ns", &network, image::NAME, id];
    runtime.ctr(&[&flags[..], &rest, command].concat()).unwrap();
}

/// All of containerd's task events.
struct Events {
    process: Child,
    output: PathBuf,
}

impl Events {
    fn of(runtime: &Runtime) -> Self {
        let output = runtime.dir.join("events");
        let socket = runtime.dir.join("grpc.sock");
        let process = Command::new("ctr")
            .arg("-a")
            .arg(socket)
            .args(["-n", "k8s.io", "events"])
            .stdin(Stdio::null())
            .stdout(fs::File::create(&output).unwrap())
            .spawn()
            .unwrap();
        Self { process, output }
    }

    fn executed(&self) -> usize {
        let text = fs::read_to_string(&self.output).unwrap();
        text.matches("/tasks/exec-added").count()
    }

    fn wait_for_exec(&self, runtime: &Runtime, id: &str) {
        let before = self.executed();
        eventually("an execution is reported", TIMEOUT, || {
            let number = format!("x{}", self.executed() + before);
            let command = [
                "tasks",
                "exec",
                "--exec-id",
                &number,
                id,
                "/bin/busybox",
                "true",
            ];
            runtime.ctr(&command).map(drop).unwrap_or_default();
            ensure!(self.executed() > before, "not yet");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // It has ended already, or ends now.
        self.process.kill().unwrap_or_default();
        self.process.wait().map(drop).unwrap_or_default();
    }
}

#[test]
fn servers_in_containers_are_reported_by_how_they_bind_and_nothing_is_executed_in_them() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web")).unwrap();
    let httpd = |id: &str, to: &str| {
        let command = ["/bin/busybox", "httpd", "-f", "-p", to];
        contained(&runtime, &pod, id, &command);
    };
    httpd("wildcard", "8081");
    httpd("localhost", "127.0.0.1:8082");
    httpd("pod-ip", &format!("{}:8083", pod.v4));
    let events = Events::of(&runtime);
    // Executions are observed from here.
    events.wait_for_exec(&runtime, "localhost");
    let before = events.executed();
    let wanted = [
        (8081, BindKind::Wildcard),
        (8082, BindKind::Localhost),
        (8083, BindKind::PodIp),
    ];
    until_bound(&runtime, &wanted);
    for _ in 0..20 {
        report(&runtime).unwrap();
    }
    assert_eq!(events.executed(), before);
    events.wait_for_exec(&runtime, "wildcard");
    for id in ["wildcard", "localhost", "pod-ip"] {
        runtime
            .ctr(&["tasks", "kill", "-s", "SIGKILL", id])
            .unwrap();
        eventually("its container goes", TIMEOUT, || {
            runtime
                .ctr(&["tasks", "rm", id])
                .map(drop)
                .unwrap_or_default();
            runtime.ctr(&["containers", "rm", id])
        })
        .unwrap();
    }
    until_bound(&runtime, &[]);
    runtime.end(&pod.container_id).unwrap();
}

fn postgres() -> Option<PathBuf> {
    let versions = fs::read_dir(POSTGRES).ok()?;
    let programs = versions.filter_map(|version| Some(version.ok()?.path().join("bin")));
    programs.into_iter().find(|it| it.join("initdb").is_file())
}

/// PostgreSQL refuses to run as root.
fn as_user<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    let user = [
        "setpriv",
        "--reuid=postgres",
        "--regid=postgres",
        "--clear-groups",
    ];
    [&user[..], rest].concat()
}

/// A database in a pod's network, stopped on drop.
struct Database(Child);

impl Database {
    fn start(pod: &Pod, program: &str, data: &Path, to: &str) -> Self {
        let data = data.display().to_string();
        let (addresses, sockets) = (
            format!("listen_addresses={to}"),
            format!("unix_socket_directories={data}"),
        );
        let server = [program, "-D", &data, "-c", &addresses, "-c", &sockets];
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", pod.path().display()));
        command.args(as_user(&server)).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SIGINT: fast shutdown with all helper processes.
        let pid = self.0.id().to_string();
        run("kill", &["-INT", &pid]).map(drop).unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

#[test]
fn a_database_is_reported_by_how_it_binds() {
    let Some(programs) = postgres() else {
        return not_run(format!(
            "no PostgreSQL below {POSTGRES} (apt-get install postgresql)"
        ));
    };
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("db")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    run("chown", &["postgres", &path]).unwrap();
    let data = dir.path().join("data");
    let program = |name: &str| programs.join(name).display().to_string();
    let (initdb, server) = (program("initdb"), program("postgres"));
    let place = data.display().to_string();
    let arguments = as_user(&[&initdb, "--no-sync", "-D", &place]);
    run(arguments[0], &arguments[1..]).unwrap();
    let own: IpAddr = pod.v4.into();
    for (to, kind) in [
        ("localhost".to_owned(), BindKind::Localhost),
        (own.to_string(), BindKind::PodIp),
        ("*".to_owned(), BindKind::Wildcard),
    ] {
        let _database = Database::start(&pod, &server, &data, &to);
        until_bound(&runtime, &[(5432, kind)]);
    }
    until_bound(&runtime, &[]);
    runtime.end(&pod.container_id).unwrap();
}

/// One process opens the sockets, two of another user serve. Stopped on drop.
struct WebServer(Child);

impl WebServer {
    fn start(pod: &Pod, dir: &Path, listens: &str) -> Self {
        let place = |name: &str| dir.join(name).display().to_string();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary = temporary.map(|name| format!("{name}_temp_path {};", place(name)));
        let configuration = format!(
            "daemon off; worker_processes 2; pid {}; events {{}}\nhttp {{ access_log off; {} server {{ {listens} }} }}\n",
            place("pid"),
            temporary.concat(),
        );
        let file = place("nginx.conf");
        fs::write(&file, configuration).unwrap();
        let net = format!("--net={}", pod.path().display());
        let child = Command::new("nsenter")
            .args([
                &net,
                "nginx",
                "-e",
                &place("log"),
                "-p",
                &place(""),
                "-c",
                &file,
            ])
            .stdin(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        // SIGTERM: fast shutdown with all workers.
        let pid = self.0.id().to_string();
        run("kill", &["-TERM", &pid]).map(drop).unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

/// Returns each port with its bind, socket addresses and families.
fn sockets(pod: &PodBinds) -> Vec<String> {
    let socket = |it: &Bind| {
        let families = [(it.ipv4, "4"), (it.ipv6, "6")];
        let families = families.iter().filter(|it| it.0).map(|it| it.1);
        format!(" {}/{}", it.address, families.collect::<String>())
    };
    let port = |it: &PortBinds| {
        let sockets: String = it.binds.iter().map(socket).collect();
        format!("{} {:?}{sockets}", it.port, it.kind())
    };
    pod.ports.iter().map(port).collect()
}

#[test]
fn a_web_server_of_several_processes_is_reported_by_each_of_its_sockets() {
    let runtime = Runtime::running().unwrap();
    let pod = runtime.pod(Spec::new("web")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (v4, v6) = (pod.v4, pod.v6);
    let listens = format!(
        "listen 8081; listen [::]:8081; listen 127.0.0.1:8082; listen [::1]:8082; listen {v4}:8083; listen [{v6}]:8083; \
         listen 8084 reuseport; listen [::]:8085 ipv6only=off; listen 127.0.0.1:8086; listen [::]:8086; \
         listen unix:{}/socket;",
        dir.path().display()
    );
    let server = WebServer::start(&pod, dir.path(), &listens);
    let wanted = [
        "8081 Wildcard 0.0.0.0/4 ::/6".to_owned(),
        "8082 Localhost 127.0.0.1/4 ::1/6".to_owned(),
        format!("8083 PodIp {v4}/4 {v6}/6"),
        // One socket for each worker.
        "8084 Wildcard 0.0.0.0/4 0.0.0.0/4".to_owned(),
        "8085 Wildcard ::/46".to_owned(),
        "8086 Wildcard 127.0.0.1/4 ::/6".to_owned(),
    ];
    eventually("it is reported", TIMEOUT, || {
        let found = sockets(&report(&runtime)?);
        ensure!(found == wanted, "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
    drop(server);
    until_bound(&runtime, &[]);
    runtime.end(&pod.container_id).unwrap();
}
