//! A process of the pod gives its connections ztunnel's mark.

use std::{
    env,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, ChildStdout, Command, Stdio},
};

use netconfig::conflicts::{Kind, find_conflicts};
use socket2::{Domain, Socket, Type};

use super::{FROM_ZTUNNEL, Fresh, POD, SERVER, TIMEOUT, address, dial, listen, pod};
use crate::service::cgroups::Cgroups;

/// The environment variable with the mark of the connection.
const MARK: &str = "INPOD_TEST_MARK";

/// A process in the pod with a connection to the server.
struct Application {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Application {
    fn start(pod: &Fresh, cgroups: &Cgroups, mark: u32) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["look::marked::connects", "--exact", "--ignored"])
            .args(["--nocapture", "--test-threads=1"])
            .env(MARK, mark.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = pod.run(move || command.spawn()).unwrap();
        // A socket has the cgroup of the process that opens the socket.
        cgroups.put(child.id(), "application");
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut application = Self { child, output };
        writeln!(application.child.stdin.as_mut().unwrap(), "go").unwrap();
        let mut line = String::new();
        while !line.contains("connected") {
            line.clear();
            assert_ne!(application.output.read_line(&mut line).unwrap(), 0);
        }
        application
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "the process of an application, which another test starts"]
fn connects() {
    let Some(mark) = env::var_os(MARK) else {
        return;
    };
    let mark = mark.into_string().unwrap().parse().unwrap();
    let mut input = io::stdin().lock();
    input.read_line(&mut String::new()).unwrap();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_mark(mark).unwrap();
    let server = address(SERVER, 8080).into();
    socket.connect_timeout(&server, TIMEOUT).unwrap();
    println!("\nconnected");
    input.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_connection_of_the_pod_with_ztunnels_mark_is_found() {
    let (pod, server) = pod();
    let _ztunnel = [15001, 15006, 15008].map(|port| listen(&pod, port));
    let _server = listen(&server, 8080);
    let ztunnels: Option<TcpStream> = dial(&pod, None, FROM_ZTUNNEL, address(SERVER, 8080));
    assert!(ztunnels.is_some());
    let findings = || find_conflicts(&pod.netns, &[POD.parse().unwrap()]).unwrap();
    assert_eq!(findings(), []);
    let cgroups = Cgroups::new("marked");
    let unmarked = Application::start(&pod, &cgroups, 0x538);
    assert_eq!(findings(), []);
    drop(unmarked);
    let marked = Application::start(&pod, &cgroups, FROM_ZTUNNEL);
    let found = findings();
    let kinds: Vec<_> = found.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [Kind::MarkedConnection], "{found:?}");
    let pid = format!("(pid {})", marked.child.id());
    let sentence = &found[0].sentence;
    assert!(sentence.starts_with("1 connection carries ztunnel's mark and bypasses ztunnel: "));
    assert!(sentence.contains(&pid), "{sentence}");
    drop(marked);
    assert_eq!(findings(), []);
}
