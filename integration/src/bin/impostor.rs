//! Connects to the ZDS socket without being a ztunnel.

use std::{
    io::{self, IoSliceMut, Write as _},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use inpod_proto::failure_of;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect, recvmsg,
    send, socket,
};

/// Encodes `ZdsHello{version: V1}`.
const HELLO: &[u8] = b"\x08\x01";

const USAGE: &str = "\
impostor wait SOCKET            one connection, until it ends
impostor hand-over SOCKET       one connection, kept by another process: the one
                                that connected exits at once
impostor many SOCKET NUMBER     this many connections at once, until all ended
impostor again SOCKET SECONDS   one connection after the other, each as soon as
                                the last has ended
impostor call SOCKET METHOD     one gRPC call with an empty message; prints ok,
                                or code, reason and message of the refusal

Connects to a ZDS socket without being a ztunnel, sends the hello and prints
what it receives; or calls a service without being one.";

fn main() -> anyhow::Result<ExitCode> {
    let code = integration::answer(USAGE, |arguments| {
        matches!(
            arguments,
            ["wait" | "hand-over", _] | ["inherited"] | ["many" | "again" | "call", _, _]
        )
    });
    if let Some(code) = code {
        return Ok(code);
    }
    act()?;
    Ok(ExitCode::SUCCESS)
}

fn act() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["wait", path] => wait(&greet(path)?),
        ["hand-over", path] => hand_over(greet(path)?),
        ["inherited"] => inherited(),
        ["many", path, number] => many(path, number.parse()?),
        ["call", path, method] => call(Path::new(path), method),
        ["again", path, seconds] => again(path, Duration::from_secs(seconds.parse()?)),
        _ => bail!("{USAGE}"),
    }
}

fn print_line(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

fn greet(path: &str) -> anyhow::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    let address = UnixAddr::new(Path::new(path))?;
    connect(socket.as_raw_fd(), &address).with_context(|| format!("cannot connect to {path}"))?;
    // An error is ignored, because a refused connection shows when the caller listens.
    send(socket.as_raw_fd(), HELLO, MsgFlags::MSG_NOSIGNAL)
        .map(drop)
        .unwrap_or_default();
    Ok(socket)
}

/// Receives a packet; returns the number of bytes and of descriptors, or `None` at the end of the connection.
fn next(socket: &OwnedFd) -> anyhow::Result<Option<(usize, usize)>> {
    let mut bytes = [0; 2048];
    let mut control = nix::cmsg_space!([i32; 8]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg::<()>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control),
        MsgFlags::empty(),
    );
    let message = match received {
        Err(nix::Error::ECONNRESET) => return Ok(None),
        received => received?,
    };
    let mut descriptors = 0;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(held) = control {
            descriptors += held.len();
        }
    }
    Ok((message.bytes > 0).then_some((message.bytes, descriptors)))
}

fn wait(socket: &OwnedFd) -> anyhow::Result<()> {
    print_line("connected")?;
    while let Some((bytes, descriptors)) = next(socket)? {
        print_line(&format!(
            "given {bytes} bytes and {descriptors} descriptors"
        ))?;
    }
    print_line("end")
}

fn hand_over(socket: OwnedFd) -> anyhow::Result<()> {
    let heir = Command::new(std::env::current_exe()?)
        .arg("inherited")
        .stdin(Stdio::from(socket))
        .spawn()?;
    // The heir continues alone: this process does not wait for its end.
    drop(heir);
    Ok(())
}

fn inherited() -> anyhow::Result<()> {
    let socket = io::stdin();
    wait(&std::os::fd::AsFd::as_fd(&socket).try_clone_to_owned()?)
}

fn many(path: &str, number: usize) -> anyhow::Result<()> {
    let mut sockets = Vec::with_capacity(number);
    for _ in 0..number {
        sockets.push(greet(path)?);
    }
    print_line("connected")?;
    let mut given = 0;
    for socket in &sockets {
        while let Some((_, descriptors)) = next(socket)? {
            given += descriptors;
        }
    }
    print_line(&format!("given {given} descriptors"))?;
    print_line("end")
}

fn call(socket: &Path, method: &str) -> anyhow::Result<()> {
    let Err(status) = integration::call(socket, method, ()) else {
        return print_line("ok");
    };
    let (code, reason) = (status.code(), failure_of(&status).reason.name());
    print_line(&format!("{code:?} {reason}: {}", status.message()))
}

fn again(path: &str, time: Duration) -> anyhow::Result<()> {
    print_line("connected")?;
    let end = Instant::now() + time;
    let (mut connections, mut given) = (0_u64, 0);
    while Instant::now() < end {
        let socket = greet(path)?;
        connections += 1;
        while let Some((_, descriptors)) = next(&socket)? {
            given += descriptors;
        }
    }
    print_line(&format!("given {given} descriptors"))?;
    print_line(&format!("end of {connections} connections"))
}
