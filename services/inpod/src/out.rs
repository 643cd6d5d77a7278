use std::{
    env,
    io::{self, BufWriter, IsTerminal as _, StdoutLock, Write},
};

use crate::error::CommandError;

/// Standard output, which is flushed after each call because the reader of a watch waits for every line.
#[derive(Debug)]
pub(crate) struct Out<W: Write = BufWriter<StdoutLock<'static>>>(W);

impl Out {
    pub(crate) fn stdout() -> Self {
        Self(BufWriter::new(io::stdout().lock()))
    }
}

/// Returns whether standard output shows colours: a terminal that NO_COLOR (no-color.org) does not restrict.
pub(crate) fn has_colour() -> bool {
    let forbidden = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !forbidden
}

impl<W: Write> Out<W> {
    pub(crate) fn print_text(&mut self, text: &str) -> Result<(), CommandError> {
        self.0.write_all(text.as_bytes())?;
        Ok(self.0.flush()?)
    }

    pub(crate) fn print_line(&mut self, line: &str) -> Result<(), CommandError> {
        writeln!(self.0, "{line}")?;
        Ok(self.0.flush()?)
    }
}
