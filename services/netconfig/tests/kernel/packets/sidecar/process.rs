//! A proxy's process is this test binary again with one test. It serves until its standard input is closed.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use netconfig::Family;
use socket2::{Domain, Socket, Type};

use crate::packets::{
    checks::FROM_ZTUNNEL,
    probe::{Owner, TIMEOUT},
    stand_in::{By, Listener, bound, canonical, original_destination},
    world::{World, loopback},
};

/// Gives the process a role.
const ROLE: &str = "INPOD_TEST_PROXY";

/// All its listeners are open.
const READY: &str = "the proxy is ready";

/// So many concurrent connections count as a loop.
const LOOP: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Reports what it saw, then echoes.
    Answers,
    /// Reports, and connects to the original destination: from 127.0.0.6 or ::6 to the application.
    Forwards,
    /// The same with the client's source address, by transparent sockets.
    ForwardsInTheClientsName,
}

impl Role {
    const ALL: [Self; 3] = [
        Self::Answers,
        Self::Forwards,
        Self::ForwardsInTheClientsName,
    ];
}

pub(super) struct Proxy {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Proxy {
    pub(super) fn start(world: &World, owner: Owner, role: Role, pod: Option<u32>) -> Self {
        let mut command = command(owner, pod);
        command
            .args(["packets::sidecar::process::serves", "--exact", "--ignored"])
            .args(["--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role:?} {:?}", world.families()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let spawned = world.pod.run(move || command.spawn());
        let mut child = spawned.unwrap_or_else(|error| {
            panic!("the test binary is to be executable for every user: {error}")
        });
        let mut proxy = Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        proxy.hear(READY);
        proxy
    }

    /// Transparent sockets accept foreign destinations.
    pub(super) fn set_transparent(&mut self, transparent: bool) {
        let input = self.input.as_mut().unwrap();
        writeln!(input, "{transparent}").unwrap();
        self.hear(&format!("transparent: {transparent}"));
    }

    fn hear(&mut self, wanted: &str) {
        let mut line = String::new();
        while !line.contains(wanted) {
            line.clear();
            let length = self.output.read_line(&mut line).unwrap();
            assert_ne!(length, 0, "the proxy ended before it reported: {wanted}");
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.input.take());
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Runs it in a process's user namespace, if given.
fn command(owner: Owner, pod: Option<u32>) -> Command {
    let own = std::env::current_exe().unwrap();
    let Owner { user, group } = owner;
    match pod {
        None => {
            // Transparent sockets need this one capability.
            let mut command = Command::new("setpriv");
            command.args([format!("--reuid={user}"), format!("--regid={group}")]);
            command.args([
                "--clear-groups",
                "--inh-caps=+net_admin",
                "--ambient-caps=+net_admin",
            ]);
            command.arg(own);
            command
        }
        Some(pod) => {
            let mut command = Command::new("nsenter");
            command.args(["--user", "--net", "--target", &pod.to_string()]);
            command.args([format!("--setuid={user}"), format!("--setgid={group}")]);
            command.arg(own);
            command
        }
    }
}

#[test]
#[ignore = "the process of a proxy, which other tests start"]
fn serves() {
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let role = role.into_string().unwrap();
    let families =
        Family::ALL.map(|family| role.contains(&format!("{family:?}")).then_some(family));
    let mut roles = Role::ALL.into_iter();
    let named = role.split(' ').next().unwrap();
    let role = roles.find(|role| format!("{role:?}") == named).unwrap();
    let listening = Listening::start(role, families.into_iter().flatten());
    println!("\n{READY}");
    for line in io::stdin().lines().map_while(Result::ok) {
        let transparent = line == "true";
        listening.set_transparent(transparent);
        println!("transparent: {transparent}");
    }
}

struct Listening {
    answering: Vec<Listener>,
    forwarding: Vec<Socket>,
}

impl Listening {
    fn start(role: Role, families: impl Iterator<Item = Family>) -> Self {
        let any = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let mut listening = Self {
            answering: Vec::new(),
            forwarding: Vec::new(),
        };
        for port in [15001, 15006] {
            if role == Role::Answers {
                let listener = Listener::tcp_here(By::Ztunnel(port), any(port));
                listening.answering.push(listener);
            } else {
                listening
                    .forwarding
                    .push(forward_all(role, port, any(port)));
            }
        }
        for family in families {
            let (by, at) = (By::Ztunnel(15053), SocketAddr::new(loopback(family), 15053));
            let listeners = [Listener::tcp_here(by, at), Listener::udp_here(by, at)];
            listening.answering.extend(listeners);
        }
        if role == Role::ForwardsInTheClientsName {
            listening.set_transparent(true);
        }
        listening
    }

    /// Applies to inbound connections' listeners.
    fn set_transparent(&self, transparent: bool) {
        let is_inbound = |listener: &&Listener| listener.by == By::Ztunnel(15006);
        for listener in self.answering.iter().filter(is_inbound) {
            listener.set_transparent(transparent);
        }
        for socket in self.forwarding.iter().skip(1) {
            socket.set_ip_transparent_v6(transparent).unwrap();
        }
    }
}

fn forward_all(role: Role, port: u16, at: SocketAddr) -> Socket {
    let socket = bound(Type::STREAM, at);
    socket.listen(256).unwrap();
    let listener: TcpListener = socket.try_clone().unwrap().into();
    let open = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let open = Arc::clone(&open);
            thread::spawn(move || {
                if open.fetch_add(1, Ordering::Relaxed) < LOOP {
                    drop(forward(role, port, &stream));
                } else {
                    drop((&stream).write_all(b"a loop\n"));
                }
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    socket
}

/// Reports, then relays the original destination's data.
fn forward(role: Role, port: u16, client: &TcpStream) -> io::Result<()> {
    let (local, peer) = (
        canonical(client.local_addr()?),
        canonical(client.peer_addr()?),
    );
    let to = original_destination(client).unwrap_or(local);
    let mut report = client;
    writeln!(report, "through {port} {} {to}", peer.ip())?;
    match connect(role, port, peer.ip(), to) {
        Err(error) => writeln!(report, "in vain: {:?}", error.kind()),
        Ok(server) => {
            let (client, back) = (client.try_clone()?, server.try_clone()?);
            thread::spawn(move || {
                drop(io::copy(&mut &client, &mut &back));
                drop(back.shutdown(Shutdown::Write));
            });
            drop(io::copy(&mut &server, &mut report));
            report.shutdown(Shutdown::Both)
        }
    }
}

fn connect(role: Role, port: u16, client: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    let is_inbound = port == 15006;
    if is_inbound && role == Role::Forwards {
        let own: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::new(127, 0, 0, 6).into(),
            SocketAddr::V6(_) => Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6).into(),
        };
        socket.bind(&SocketAddr::new(own, 0).into())?;
    } else if is_inbound {
        match to {
            SocketAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
            SocketAddr::V6(_) => socket.set_ip_transparent_v6(true)?,
        }
        socket.set_mark(FROM_ZTUNNEL)?;
        socket.bind(&SocketAddr::new(client, 0).into())?;
    }
    socket.connect_timeout(&to.into(), TIMEOUT)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    Ok(stream)
}
