//! A pod's netns, and `validate` in it.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::ensure;
use inpod_linux::Netns;
use integration::{TIMEOUT, bin_for_all, eventually, guard, is_alone, run};
use nix::unistd::{Uid, setfsuid};
use socket2::{Domain, Protocol, Socket, Type};

static NEXT: AtomicU32 = AtomicU32::new(1);

pub(crate) const V4: &str = "10.77.0.7/24";
pub(crate) const V6: &str = "fd77::7/64";

pub(crate) fn proxy() -> u32 {
    if is_alone() { 0 } else { 1337 }
}

pub(crate) struct Sandbox {
    name: String,
    pub(crate) netns: Netns,
}

impl Sandbox {
    pub(crate) fn new(addresses: &[&str]) -> Self {
        guard().unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("validate-{}-{number}", std::process::id());
        run("ip", &["netns", "add", &name]).unwrap();
        let path = PathBuf::from("/run/netns").join(&name);
        let netns = Netns::open(&path, &["/run/netns".into()]).unwrap();
        let sandbox = Self { name, netns };
        sandbox.ip("link set lo up");
        sandbox.ip("link add eth0 type veth peer name peer0");
        sandbox.ip("link set eth0 up");
        sandbox.ip("link set peer0 up");
        for address in addresses {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            sandbox.ip(&format!("addr add {address} dev eth0{nodad}"));
            sandbox.until_local(address);
        }
        sandbox
    }

    /// The kernel makes a new IPv6 address local with a delay.
    fn until_local(&self, address: &str) {
        let (address, _) = address.split_once('/').unwrap();
        eventually("the address is local", TIMEOUT, || {
            let found = run("ip", &["-n", &self.name, "route", "get", address])?;
            ensure!(found.starts_with("local"), "{found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn ip(&self, arguments: &str) {
        let words = ["-n", &self.name];
        let words: Vec<_> = words.into_iter().chain(arguments.split(' ')).collect();
        run("ip", &words).unwrap();
    }

    /// Applies one family's rules, as istio-iptables writes them by default.
    pub(crate) fn redirect(self, family: &str) -> Self {
        let (loopback, inbound) = match family {
            "ip" => ("ip daddr 127.0.0.1", "ip saddr 127.0.0.6"),
            _ => ("ip6 daddr ::1", "ip6 saddr ::6"),
        };
        let (proxy, outer) = (proxy(), loopback.replace("daddr", "daddr !="));
        let script = format!(
            "table {family} sidecar {{ chain output {{ type nat hook output priority -100; policy accept; \
             oifname \"lo\" {inbound} accept; \
             oifname \"lo\" {outer} tcp dport != 15008 meta skuid {proxy} redirect to :15006; \
             oifname \"lo\" meta skuid != {proxy} accept; meta skuid {proxy} accept; {loopback} accept; \
             meta l4proto tcp redirect to :15001; }}\n}}"
        );
        let net = format!("--net={}", self.netns.path().display());
        run("nsenter", &[net.as_str(), "nft", &script]).unwrap();
        if family == "ip6" {
            self.ip("addr add ::6/128 dev lo");
            self.until_local("::6/128");
        }
        self
    }

    pub(crate) fn validate_as(&self, uid: u32, words: &[&str]) -> Ended {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns.path().display()));
        command.args([
            "setpriv",
            "--no-new-privs",
            "--bounding-set=-all",
            "--inh-caps=-all",
        ]);
        if !is_alone() {
            let uid = uid.to_string();
            command.args(["--clear-groups", "--reuid", &uid, "--regid", &uid]);
        }
        command
            .arg(bin_for_all("validate").unwrap())
            .args(words)
            .env_clear();
        let began = Instant::now();
        Ended::of(&command.output().unwrap(), began.elapsed())
    }

    pub(crate) fn validate(&self, words: &[&str]) -> Ended {
        self.validate_as(proxy(), words)
    }

    /// Binds on every address without sharing, and closes again.
    pub(crate) fn bind_alone(&self, port: u16) {
        let bind = || {
            let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
            socket.set_only_v6(false)?;
            let address = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
            socket.bind(&address.into())
        };
        self.netns.within(bind).unwrap().unwrap();
    }

    pub(crate) fn listen_as(&self, uid: u32, port: u16, shares: bool) -> Socket {
        let listen = || {
            let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
            socket.set_only_v6(false).unwrap();
            socket.set_reuse_address(true).unwrap();
            socket.set_reuse_port(shares).unwrap();
            let address = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
            socket.bind(&address.into()).unwrap();
            socket.listen(64).unwrap();
            socket
        };
        self.netns
            .within(|| {
                // A socket's owner is its thread's filesystem user; only one owner's sockets share a port.
                let before = setfsuid(Uid::from_raw(uid));
                let socket = listen();
                setfsuid(before);
                socket
            })
            .unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        run("ip", &["netns", "del", &self.name])
            .map(drop)
            .unwrap_or_default();
    }
}

#[derive(Debug)]
pub(crate) struct Ended {
    code: Option<i32>,
    pub(crate) line: String,
    pub(crate) took: Duration,
}

impl Ended {
    fn of(output: &Output, took: Duration) -> Self {
        // Only invalid arguments, exit code 2, are reported on standard error.
        let is_usage_error = output.status.code() == Some(2);
        assert_eq!(output.stderr.is_empty(), !is_usage_error, "{output:?}");
        assert_eq!(output.stdout.is_empty(), is_usage_error, "{output:?}");
        let text = String::from_utf8([&*output.stdout, &*output.stderr].concat()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        Self {
            code: output.status.code(),
            line: text,
            took,
        }
    }

    #[track_caller]
    pub(crate) fn is(&self, code: i32, words: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.line.contains(word), "{word}: {self:?}");
        }
        self
    }
}
