//! Reads stdin with a limit on size and time, because the runtime may never close the pipe.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    time::Instant,
};

use inpod_cni::{
    config::MAX_CONFIG_BYTES,
    error::{CniError, ErrorCode},
    invocation::{Invocation, Variables, Verb},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd,
};

use crate::call::Call;

/// Parses the call, and leaves all bytes read so far in `stdin`, even after an error.
///
/// # Errors
///
/// Fails with code 5 if stdin fails or does not end before the deadline, with code 6 if stdin is
/// too large, and otherwise with the errors of [`Invocation::parse`].
pub(crate) fn read_invocation(
    variables: &Variables,
    call: &Call,
    stdin: &mut Vec<u8>,
) -> Result<Invocation, CniError> {
    // A call without a valid verb fails at once, so stdin is not read.
    let verb = variables.verb()?;
    let read = read_all(io::stdin().as_fd(), stdin, call.deadline);
    if verb != Verb::Version {
        read?;
    }
    Invocation::parse(variables, stdin)
}

fn read_all(from: BorrowedFd<'_>, into: &mut Vec<u8>, deadline: Instant) -> Result<(), CniError> {
    let mut chunk = [0; 16 * 1024];
    loop {
        wait_readable(from, deadline)?;
        match unistd::read(from, &mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => into.extend(chunk.iter().take(n)),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(error) => return Err(read_error(error)),
        }
        if into.len() > MAX_CONFIG_BYTES {
            let msg = format!("stdin is longer than {MAX_CONFIG_BYTES} bytes");
            return Err(CniError::new(ErrorCode::Decode, msg));
        }
    }
}

/// Waits until stdin has data or has ended, but not beyond the deadline.
fn wait_readable(from: BorrowedFd<'_>, deadline: Instant) -> Result<(), CniError> {
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(from, PollFlags::POLLIN)], timeout) {
            Ok(0) if remaining.is_zero() => return Err(not_closed()),
            // poll(2) counts milliseconds and may return early, so the loop checks the time again.
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(read_error(error)),
        }
    }
}

fn not_closed() -> CniError {
    CniError::new(ErrorCode::Io, "stdin was not closed in time by the runtime")
}

fn read_error(error: Errno) -> CniError {
    CniError::new(ErrorCode::Io, format!("cannot read stdin: {error}"))
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, thread, time::Duration};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn what_comes_in_pieces_is_read_to_the_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let writing = thread::spawn(move || {
            for _ in 0..100 {
                writer.write_all(&[b'x'; 1000]).unwrap();
            }
        });
        let mut read = Vec::new();
        read_all(reader.as_fd(), &mut read, later()).unwrap();
        writing.join().unwrap();
        assert_eq!(read.len(), 100_000);
    }

    #[test]
    fn a_stdin_that_never_ends_is_error_5_at_the_deadline() {
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"{}").unwrap();
        let error = read_all(reader.as_fd(), &mut Vec::new(), soon()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Io);
    }

    #[test]
    fn a_stdin_without_measure_is_error_6_and_not_read_to_the_end() {
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        let error = read_all(zeros.as_fd(), &mut Vec::new(), later()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Decode);
    }

    #[test]
    fn what_cannot_be_read_is_error_5() {
        let directory = std::fs::File::open("/").unwrap();
        let error = read_all(directory.as_fd(), &mut Vec::new(), later()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Io);
    }
}
