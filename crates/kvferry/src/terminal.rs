//! Writing to the terminal: plain when it is a pipe or `NO_COLOR` is set.

use std::{
    fmt,
    io::{ErrorKind, IsTerminal, Write},
    sync::OnceLock,
};

use comfy_table::{ContentLineStyle, LineStyle, Table, TableStyle};
use kvferry_plan::Blame;

use crate::failure::Failure;

/// Why stdout could not be written, once it could not.
static LOST: OnceLock<String> = OnceLock::new();

/// A look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Bad,
    Dim,
    Good,
    Strong,
}

/// `text` in a look, if stdout is a terminal.
pub(crate) fn styled(look: Look, text: impl fmt::Display) -> String {
    let plain =
        !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    if plain {
        return text.to_string();
    }
    let code = match look {
        Look::Bad => "1;31",
        Look::Dim => "2",
        Look::Good => "1;32",
        Look::Strong => "1",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Writes without a line end, at once. A reader that has gone away is not an error: exit codes tell the result. Any
/// other error is kept for [`written`].
pub(crate) fn piece(text: impl fmt::Display) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = write!(out, "{text}").and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        LOST.get_or_init(|| error.to_string());
    }
}

/// Whether everything that was written to stdout arrived there.
pub(crate) fn written() -> Result<(), Failure> {
    LOST.get().map_or(Ok(()), |why| {
        Err(Failure::new(
            Blame::Environment,
            format!("what was found could not be written to standard output: {why}"),
        ))
    })
}

/// Writes a line.
pub(crate) fn line(text: impl fmt::Display) {
    piece(format_args!("{text}\n"));
}

/// Writes an error to stderr.
pub(crate) fn complain(failure: &Failure) {
    let _ = writeln!(std::io::stderr(), "error ({}): {failure}", failure.blame());
}

/// Writes a note to stderr.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::new('╭', '─', '┬', '╮'))
    .header_lines(ContentLineStyle::new('│', '│', '│'))
    .header_separator(LineStyle::new('├', '─', '┼', '┤'))
    .content_lines(ContentLineStyle::new('│', '│', '│'))
    .bottom_border(LineStyle::new('╰', '─', '┴', '╯'));

/// An empty table in this program's look.
pub(crate) fn table() -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table
}
