//! State of Istio's node agent: its rules in a pod, and a session with ztunnel (services/docs/facts/istio-ambient.md,
//! 6.1, 6.3 and 7.3).

use std::{
    fs::File,
    io::{IoSlice, Read as _, Write as _},
    os::fd::{AsRawFd as _, RawFd},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use integration::{Pod, TIMEOUT};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use prost::Message as _;
use socket2::{Domain, SockAddr, Socket, Type};
use zds_client::proto::{
    AddWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest, WorkloadResponse,
    workload_request::Payload, workload_response,
};

/// Socket and ztunnel close on drop.
pub(crate) struct Incumbent {
    _listener: Socket,
    ztunnel: Socket,
}

impl Incumbent {
    /// Listens, has a ztunnel started, and waits for its hello.
    pub(crate) fn serve(
        path: &Path,
        start_ztunnel: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(path.parent().context("a socket is in a directory")?)?;
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        listener.bind(&SockAddr::unix(path)?)?;
        listener.listen(8)?;
        listener.set_read_timeout(Some(TIMEOUT))?;
        start_ztunnel()?;
        let (ztunnel, _) = listener.accept().context("no ztunnel came")?;
        ztunnel.set_read_timeout(Some(TIMEOUT))?;
        let mut incumbent = Self {
            _listener: listener,
            ztunnel,
        };
        ensure!(incumbent.receive()? == [8, 1], "another hello");
        Ok(incumbent)
    }

    /// Sends an Add for each pod, then SnapshotSent, each acknowledged.
    pub(crate) fn give(&mut self, pods: &[Pod]) -> anyhow::Result<()> {
        for pod in pods {
            let add = AddWorkload {
                uid: pod.spec.uid.clone(),
                workload_info: Some(WorkloadInfo {
                    name: pod.spec.name.clone(),
                    namespace: pod.spec.namespace.clone(),
                    service_account: format!("sa-{}", pod.spec.name),
                }),
            };
            let netns = File::open(pod.path())?;
            self.ask(Payload::Add(add), &[netns.as_raw_fd()])?;
        }
        self.ask(Payload::SnapshotSent(SnapshotSent {}), &[])
    }

    fn ask(&mut self, payload: Payload, descriptors: &[RawFd]) -> anyhow::Result<()> {
        let request = WorkloadRequest {
            payload: Some(payload),
        };
        let (packet, rights) = (
            request.encode_to_vec(),
            [ControlMessage::ScmRights(descriptors)],
        );
        let control = if descriptors.is_empty() {
            &[][..]
        } else {
            &rights
        };
        let (socket, packet) = (self.ztunnel.as_raw_fd(), [IoSlice::new(&packet)]);
        sendmsg(
            socket,
            &packet,
            control,
            MsgFlags::empty(),
            None::<&UnixAddr>,
        )?;
        let response = WorkloadResponse::decode(&*self.receive()?)?;
        let Some(workload_response::Payload::Ack(ack)) = response.payload else {
            anyhow::bail!("no ack");
        };
        ensure!(ack.error.is_empty(), "refused: {}", ack.error);
        Ok(())
    }

    fn receive(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut buffer = vec![0; 4096];
        let length = self.ztunnel.read(&mut buffer).context("no packet")?;
        buffer.truncate(length);
        Ok(buffer)
    }
}

/// The forms of its rules; the node agent writes iptables unless `nativeNftables` is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Iptables,
    Nft,
    /// Chosen where rules are in iptables' legacy tables already.
    Legacy,
}

/// Applies its rules, routes and ip rules, without DNS capture.
pub(crate) fn redirect(pod: &Pod, form: Form) -> anyhow::Result<()> {
    for family in ["-4", "-6"] {
        let rule = [
            "ip",
            family,
            "rule",
            "add",
            "fwmark",
            "0x111/0xfff",
            "pref",
            "32764",
            "lookup",
            "100",
        ];
        pod.exec(&rule)?;
        let route = [
            "ip", family, "route", "replace", "local", "default", "dev", "lo", "table", "100",
        ];
        pod.exec(&route)?;
    }
    match form {
        Form::Nft => feed(pod, &["nft", "-f", "-"], NFTABLES),
        Form::Iptables => restore(pod, ["iptables-nft-restore", "ip6tables-nft-restore"]),
        Form::Legacy => restore(pod, ["iptables-legacy-restore", "ip6tables-legacy-restore"]),
    }
}

fn restore(pod: &Pod, [v4, v6]: [&str; 2]) -> anyhow::Result<()> {
    feed(pod, &[v4, "--noflush", "-w", "20"], IPTABLES)?;
    let rules = IPTABLES.replace("127.0.0.1/32", "::1/128");
    let rules = rules.replace("169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff");
    feed(pod, &[v6, "--noflush", "-w", "20"], &rules)
}

/// Runs a program with a standard input in the pod's netns.
fn feed(pod: &Pod, command: &[&str], text: &str) -> anyhow::Result<()> {
    let mut program = Command::new("nsenter")
        .arg(format!("--net={}", pod.path().display()))
        .args(command)
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run nsenter; is util-linux installed?")?;
    let mut input = program.stdin.take().context("its input")?;
    input.write_all(text.as_bytes())?;
    drop(input);
    ensure!(
        program.wait()?.success(),
        "{command:?} refused the incumbent's rules"
    );
    Ok(())
}

const IPTABLES: &str = "\
*mangle
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s 169.254.7.127 -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -d 169.254.7.127 -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
";

const NFTABLES: &str = r#"
add table inet istio-ambient-nat
flush table inet istio-ambient-nat
add chain inet istio-ambient-nat prerouting { type nat hook prerouting priority -100 ; }
add chain inet istio-ambient-nat output { type nat hook output priority -100 ; }
add chain inet istio-ambient-nat istio-prerouting
add chain inet istio-ambient-nat istio-output
add rule inet istio-ambient-nat output jump istio-output
add rule inet istio-ambient-nat prerouting jump istio-prerouting
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip saddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-prerouting ip daddr != 127.0.0.1/32 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-prerouting ip6 daddr != ::1/128 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-output meta l4proto tcp mark and 0xfff == 0x111 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip daddr != 127.0.0.1/32 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip6 daddr != ::1/128 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr != 127.0.0.1/32 mark and 0xfff != 0x539 counter redirect to :15001
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr != ::1/128 mark and 0xfff != 0x539 counter redirect to :15001
add table inet istio-ambient-mangle
flush table inet istio-ambient-mangle
add chain inet istio-ambient-mangle prerouting { type filter hook prerouting priority -150 ; }
add chain inet istio-ambient-mangle output { type route hook output priority -150 ; }
add chain inet istio-ambient-mangle istio-prerouting
add chain inet istio-ambient-mangle istio-output
add rule inet istio-ambient-mangle prerouting jump istio-prerouting
add rule inet istio-ambient-mangle output jump istio-output
add rule inet istio-ambient-mangle istio-prerouting meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111
add rule inet istio-ambient-mangle istio-output ct mark and 0xfff == 0x111 counter meta mark set ct mark
"#;
