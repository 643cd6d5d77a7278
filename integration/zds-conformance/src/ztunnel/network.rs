//! Connects a pod to a client in a second netns by a veth pair, and redirects the pod's connections to ztunnel by
//! Istio's rules.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};

use crate::{
    case::{Outcome, Stop, check, failed},
    netns::Netns,
};

/// The UID of the pods with traffic.
pub const UID: &str = "traffic";

/// The addresses of a pod and its client, one pair per family.
const PAIRS: [Pair; 2] = [
    Pair {
        pod: IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)),
        client: IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1)),
    },
    Pair {
        pod: IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2)),
        client: IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1)),
    },
];

/// The port of the application in the pod, and of the server outside.
const SERVER_PORT: u16 = 8080;

/// The port from which the application connects; the guard takes other source ports for ztunnel's.
const APPLICATION_PORT: u16 = 7001;

const LOOPS: &str = include_str!("loops.nft");
const RULES: &str = include_str!("redirection.nft");

const POLL_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub pod: IpAddr,
    pub client: IpAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the application in the pod, through port 15006.
    Inbound,
    /// From the application in the pod to a server at the client, through port 15001.
    Outbound,
}

#[derive(Debug)]
pub struct Network {
    pub pod: Netns,
    pub client: Netns,
    deadline: Duration,
}

/// A connection through ztunnel after a request and a response.
#[derive(Debug)]
pub struct Forwarded {
    name: String,
    client: TcpStream,
    server: TcpStream,
    /// The client's address, as the server sees it.
    pub source: IpAddr,
}

impl Network {
    /// Connects a new pod and its client, without any rules.
    pub fn make(deadline: Duration) -> Outcome<Self> {
        let (pod, client) = (Netns::make()?, Netns::make()?);
        let network = Self {
            pod,
            client,
            deadline,
        };
        let peer = network.client.path();
        let link = format!(
            "link add eth0 type veth peer name eth0 netns {}\n",
            peer.display()
        );
        let addresses = |of: fn(&Pair) -> IpAddr| -> String {
            let pairs = network.pairs().into_iter();
            pairs
                .map(|pair| match of(&pair) {
                    IpAddr::V4(address) => format!("addr add {address}/24 dev eth0\n"),
                    IpAddr::V6(address) => format!("addr add {address}/64 dev eth0 nodad\n"),
                })
                .collect()
        };
        let up = "link set eth0 up\n";
        let pod = format!("{link}{up}{}", addresses(|pair| pair.pod));
        let client = format!("{up}{}", addresses(|pair| pair.client));
        ip(&network.pod, &["-batch", "-"], pod)?;
        ip(&network.client, &["-batch", "-"], client)?;
        Ok(network)
    }

    /// Writes the rules of Istio's agent in the pod.
    pub fn redirect(&self) -> Outcome {
        for pair in self.pairs() {
            let (family, all) = if pair.pod.is_ipv4() {
                ("-4", "0.0.0.0/0")
            } else {
                ("-6", "::/0")
            };
            let routes = format!(
                "rule add fwmark 0x111/0xfff pref 32764 lookup 100\nroute replace local {all} dev lo table 100\n"
            );
            ip(&self.pod, &[family, "-batch", "-"], routes)?;
        }
        nft(&self.pod, &["-f", "-"], format!("{LOOPS}{RULES}")).map(drop)
    }

    /// Stops ztunnel's connections to its own listeners, in a pod without the rules of Istio's agent.
    pub fn stop_loops(&self) -> Outcome {
        nft(&self.pod, &["-f", "-"], LOOPS.to_owned()).map(drop)
    }

    /// Returns the addresses of the pod and its client for each family that the kernel has.
    pub fn pairs(&self) -> Vec<Pair> {
        let has_ipv6 = self.pod.has_ipv6();
        let pairs = PAIRS.into_iter();
        pairs
            .filter(|pair| pair.pod.is_ipv4() || has_ipv6)
            .collect()
    }

    /// Sends a request and a response through ztunnel. Fails if ztunnel does not forward both, or opens a connection
    /// without the mark.
    pub fn forward(&self, direction: Direction, pair: Pair) -> Outcome<Forwarded> {
        let forwarded = self.exchange(direction, pair);
        // The guard rejects connections without the mark, so a missing mark explains a failed exchange.
        let unmarked = self.counter("unmarked")?;
        check(
            unmarked == 0,
            "the mark 0x539 on each connection that ztunnel opens",
            || format!("{unmarked} SYN packets without the mark"),
        )?;
        forwarded
    }

    fn exchange(&self, direction: Direction, pair: Pair) -> Outcome<Forwarded> {
        let (from, to, address, port) = match direction {
            Direction::Inbound => (&self.client, &self.pod, pair.pod, 0),
            Direction::Outbound => (&self.pod, &self.client, pair.client, APPLICATION_PORT),
        };
        let address = SocketAddr::new(address, SERVER_PORT);
        let name = format!("{direction:?} connection to {address}").to_lowercase();
        let server = to.run(move || TcpListener::bind(address))?;
        let deadline = self.deadline;
        let client = from.run(move || connect(port, address, deadline));
        let mut client = client
            .or_else(|error| failed(format!("ztunnel accepts an {name}"), error.to_string()))?;
        client.write_all(REQUEST)?;
        let Some((server, source)) = accept(&server, deadline)? else {
            let seen = format!(
                "no connection there; at the client: {}",
                describe(&mut client)
            );
            return failed(format!("ztunnel forwards an {name}"), seen);
        };
        server.set_read_timeout(Some(deadline))?;
        let mut forwarded = Forwarded {
            name,
            client,
            server,
            source: source.ip().to_canonical(),
        };
        forwarded.respond("")?;
        Ok(forwarded)
    }

    /// Returns the count of a counter of the rules.
    pub fn counter(&self, name: &'static str) -> Outcome<u64> {
        let arguments = ["list", "counter", "inet", "conformance", name];
        let text = nft(&self.pod, &arguments, String::new())?;
        let mut words = text
            .split_whitespace()
            .skip_while(|word| *word != "packets");
        let count = words.nth(1).and_then(|count| count.parse().ok());
        count.ok_or_else(|| Stop::Broken(format!("nft shows no counter {name}: {text}")))
    }
}

impl Forwarded {
    /// Sends another request and its response through ztunnel.
    pub fn exchange(&mut self, when: &str) -> Outcome {
        // The request fails if ztunnel has ended the connection; the response then fails, too.
        drop(self.client.write_all(REQUEST));
        self.respond(when)
    }

    /// Ends the sending of the client; the server reads the end, and its response arrives nevertheless.
    pub fn half_close(mut self) -> Outcome {
        self.client.shutdown(Shutdown::Write)?;
        let seen = describe(&mut self.server);
        let expected = format!(
            "{END} at the server, after the client of an {} has sent all",
            self.name
        );
        check(seen == END, &expected, || seen)?;
        let responded = self.server.write_all(RESPONSE);
        let responded = responded.and_then(|()| self.client.read_exact(&mut [0; RESPONSE.len()]));
        let expected = format!("a response through a half-closed {}", self.name);
        responded.or_else(|error| failed(expected, error.to_string()))
    }

    /// Reads a request on the server's side, and sends the response to the client.
    fn respond(&mut self, when: &str) -> Outcome {
        let name = &self.name;
        let expected = format!("a request and a response through an {name} {when}");
        let responded = (|| {
            self.server.read_exact(&mut [0; REQUEST.len()])?;
            self.server.write_all(RESPONSE)?;
            self.client.read_exact(&mut [0; RESPONSE.len()])
        })();
        responded.or_else(|error| failed(expected.trim_end(), error.to_string()))
    }

    /// Fails unless the client sees the end of the connection within `deadline`.
    pub fn ended(&mut self, deadline: Duration, when: &str) -> Outcome {
        self.client.set_read_timeout(Some(deadline))?;
        let seen = describe(&mut self.client);
        let name = &self.name;
        check(seen == END, &format!("the end of an {name} {when}"), || {
            seen
        })
    }
}

const REQUEST: &[u8] = b"request";
const RESPONSE: &[u8] = b"response";

const END: &str = "the end of the connection";

/// Waits for data on a connection, and describes the result.
pub fn describe(stream: &mut TcpStream) -> String {
    match stream.read(&mut [0; 64]) {
        Ok(0) => END.to_owned(),
        Ok(bytes) => format!("{bytes} bytes"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => END.to_owned(),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => "nothing".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Fails unless ztunnel closes a connection on which the client has sent a request.
pub fn closed(mut stream: TcpStream, expected: &str) -> Outcome {
    // The request fails if ztunnel has closed the connection already.
    drop(stream.write_all(REQUEST));
    let seen = describe(&mut stream);
    drop(stream.shutdown(Shutdown::Both));
    check(seen == END, expected, || seen)
}

/// Connects in the netns of the calling thread, from a port of the kernel's choice if `port` is 0.
pub fn connect(port: u16, to: SocketAddr, deadline: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    let any = if to.is_ipv4() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        // A connection of IPv4 may have the same port.
        socket.set_only_v6(true)?;
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    socket.bind(&SocketAddr::new(any, port).into())?;
    socket.connect_timeout(&to.into(), deadline)?;
    socket.set_read_timeout(Some(deadline))?;
    Ok(socket.into())
}

fn accept(
    listener: &TcpListener,
    deadline: Duration,
) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    listener.set_nonblocking(true)?;
    let end = Instant::now() + deadline;
    loop {
        match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            accepted => return accepted.map(Some),
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn ip(netns: &Netns, arguments: &[&'static str], input: String) -> Outcome<String> {
    run(netns, ("ip", "iproute2"), arguments, input)
}

fn nft(netns: &Netns, arguments: &[&'static str], input: String) -> Outcome<String> {
    run(netns, ("nft", "nftables"), arguments, input)
}

/// Runs a program in a netns; returns its output.
fn run(
    netns: &Netns,
    (program, package): (&'static str, &str),
    arguments: &[&'static str],
    input: String,
) -> Outcome<String> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let ran = netns.run(move || {
        let child = command.spawn();
        let Ok(mut child) = child else {
            return child.map(|_| None);
        };
        if let Some(mut stdin) = child.stdin.take() {
            // The write fails if the program has ended already; the status below shows why.
            drop(stdin.write_all(input.as_bytes()));
        }
        child.wait_with_output().map(Some)
    });
    match ran {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Stop::Skipped(format!(
            "needs the program {program}, of Debian's package {package}"
        ))),
        Ok(Some(output)) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => {
            let said = output.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
            let said = said.unwrap_or_default();
            Err(Stop::Broken(format!("{program} fails: {}", said.trim())))
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes the pods with traffic as a file of `LOCAL_XDS_PATH`, because stock ztunnel forwards only for pods in the state
/// of the control plane (services/docs/facts/ztunnel.md, 2).
pub fn write_workloads(path: &Path) -> io::Result<()> {
    let [v4, v6] = PAIRS.map(|pair| pair.pod);
    fs::write(
        path,
        format!(
            "workloads:\n- uid: Kubernetes//v1/Pod/conformance/name-of-{UID}\n  name: name-of-{UID}\n  \
             namespace: conformance\n  serviceAccount: default\n  trustDomain: cluster.local\n  \
             workloadIps: [\"{v4}\", \"{v6}\"]\n  protocol: TCP\n  node: conformance\n  network: \"\"\n  services: {{}}\n"
        ),
    )
}
