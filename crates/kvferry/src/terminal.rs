//! Writing to the terminal: in at most [`WIDTH`] columns, plain when it is a pipe or `NO_COLOR` is set. Not for drawing
//! progress (`model::Progress`).

use std::{
    fmt,
    io::{ErrorKind, IsTerminal, Write},
    sync::OnceLock,
};

use comfy_table::{ContentArrangement, ContentLineStyle, LineStyle, Table, TableStyle};
use kvferry_plan::Blame;

use crate::failure::Failure;

/// Columns that everything for people keeps to, where its words allow it.
pub(crate) const WIDTH: usize = 80;

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

/// Whether what goes there may have colours.
pub(crate) fn colours(to: &impl IsTerminal) -> bool {
    to.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// `text` in a look, if stdout is a terminal.
pub(crate) fn styled(look: Look, text: impl fmt::Display) -> String {
    if !colours(&std::io::stdout()) {
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

/// Writes a paragraph; lines after the first begin with `indent` spaces.
pub(crate) fn paragraph(text: impl fmt::Display, indent: usize) {
    line(wrapped(&text.to_string(), indent));
}

/// Writes an error to stderr.
pub(crate) fn complain(failure: &Failure) {
    tell(&format!("error ({}): {failure}", failure.blame()));
}

/// Writes a note to stderr.
pub(crate) fn note(text: impl fmt::Display) {
    tell(&format!("note: {text}"));
}

/// On stderr; broken into lines only where somebody looks: programs search for the whole text.
fn tell(text: &str) {
    let text = if std::io::stderr().is_terminal() { &wrapped(text, 2) } else { text };
    // There is nowhere to say that this did not arrive.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// `text` broken at spaces into lines of at most [`WIDTH`] columns; those that it adds begin with `indent` spaces. A
/// word that is longer stays whole, because paths and commands are there to be copied.
pub(crate) fn wrapped(text: &str, indent: usize) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for (number, row) in text.split('\n').enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let mut column = 0;
        for (place, word) in row.split(' ').enumerate() {
            let wide = columns(word);
            if place > 0 && column > indent && column + 1 + wide > WIDTH {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                column = indent;
            } else if place > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += wide;
        }
    }
    out
}

/// Columns of a text; looks have none.
fn columns(text: &str) -> usize {
    let mut escaped = false;
    let shown = text.chars().filter(|c| {
        let hidden = escaped || *c == '\x1b';
        escaped = hidden && *c != 'm';
        !hidden
    });
    shown.count()
}

/// `1,234,567`.
pub(crate) fn number(n: u64) -> String {
    let digits = n.to_string();
    let (head, rest) = digits.split_at(digits.len() % 3);
    let groups = (0..rest.len()).step_by(3).map(|i| &rest[i..i + 3]);
    let all: Vec<&str> = Some(head).filter(|h| !h.is_empty()).into_iter().chain(groups).collect();
    all.join(",")
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
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH as u16);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_before_the_last_column_and_words_stay_whole() {
        let text = format!("{} {} {}", "a".repeat(50), "b".repeat(29), "c".repeat(90));
        let expected = format!("{} {}\n   {}", "a".repeat(50), "b".repeat(29), "c".repeat(90));
        assert_eq!(wrapped(&text, 3), expected);
        assert_eq!(wrapped("one\n  two  three", 4), "one\n  two  three");
        // Looks are not counted.
        let dim = format!("\x1b[2m{} b\x1b[0m", "a".repeat(78));
        assert_eq!(wrapped(&dim, 2), dim);
    }
}
