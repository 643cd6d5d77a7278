use std::{
    io::{self, Write as _},
    process::ExitCode,
};

/// Answers `--help`, `--version` and any command line that `accepts` rejects. Returns an exit code if there was an
/// answer: the program then does nothing else. `usage` begins with the program's name.
pub fn answer(usage: &str, accepts: impl Fn(&[&str]) -> bool) -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // A failed write is ignored, because the reader may have closed the pipe.
    if let ["--help" | "-h", ..] = arguments.as_slice() {
        writeln!(io::stdout(), "{usage}").unwrap_or_default();
        return Some(ExitCode::SUCCESS);
    }
    if let ["--version"] = arguments.as_slice() {
        let name = usage.split_whitespace().next().unwrap_or_default();
        writeln!(io::stdout(), "{name} {}", env!("CARGO_PKG_VERSION")).unwrap_or_default();
        return Some(ExitCode::SUCCESS);
    }
    if accepts(&arguments) {
        return None;
    }
    writeln!(io::stderr(), "{usage}").unwrap_or_default();
    Some(ExitCode::from(2))
}
