use std::io::{self, BufWriter, StdoutLock, Write};

use crate::error::CommandError;

/// Standard output, which is flushed after each call because the reader of a watch waits for every line.
#[derive(Debug)]
pub(crate) struct Out<W: Write = BufWriter<StdoutLock<'static>>>(W);

impl Out {
    pub(crate) fn stdout() -> Self {
        Self(BufWriter::new(io::stdout().lock()))
    }
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
