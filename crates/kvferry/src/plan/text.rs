//! The answer for people.

use std::fmt::Write;

use comfy_table::CellAlignment;
use kvferry_plan::{Run, Unsupported};

use super::answer::{Answer, Cost};
use super::request::Request;
use crate::terminal::{self, Look, number, styled};

/// Pairs that are listed; JSON has all.
const MAX_PAIRS: usize = 64;

pub(super) fn refusal(request: &Request, refusal: &Unsupported) -> String {
    let mut text = question(request, &styled(Look::Bad, "unsupported"));
    let why = format!("{}: {}", refusal.axis, refusal.reason);
    let _ = writeln!(text, "{}", terminal::wrapped(&why, 2));
    text
}

pub(super) fn answer(request: &Request, answer: &Answer, rows: bool) -> String {
    let mut text = question(request, &styled(Look::Good, "supported"));
    let casts: Vec<_> = answer.pair.casts().map(|(part, cast)| format!("{part} {cast}")).collect();
    if !casts.is_empty() {
        let text_of = format!("prefill converts: {}; bytes are those of decode", casts.join(", "));
        let _ = writeln!(text, "{}", terminal::wrapped(&text_of, 2));
    }
    let mut table = terminal::table();
    table.set_header([
        "prefill\nrank",
        "decode\nrank",
        "bytes",
        "runs",
        "strided\ncopies",
        "flat\ndescriptors",
    ]);
    for m in answer.moves.iter().take(MAX_PAIRS) {
        table.add_row(line(m.src.to_string(), m.dst.to_string(), m.cost));
    }
    if let Some(more) = answer.moves.len().checked_sub(MAX_PAIRS).filter(|more| *more > 0) {
        table.add_row([format!("{more} pairs more"), "(--json)".into()]);
    }
    table.add_row(line("all".into(), "all".into(), answer.total()));
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let _ = writeln!(text, "{table}");
    if rows {
        text += &all_rows(answer);
    }
    text
}

/// What was asked, and the verdict.
fn question(request: &Request, verdict: &str) -> String {
    let Request { model, prefill, decode, tokens, .. } = request;
    let (prefill, decode, count) = (&prefill.label, &decode.label, number(tokens.len()));
    let kv = kv(request);
    let question = format!("{verdict}: {prefill} → {decode}, {count} tokens ({tokens}) of {model}{kv}");
    terminal::wrapped(&question, 2) + "\n"
}

/// Element types, if what grows with tokens has one on each side.
pub(super) fn kv(request: &Request) -> String {
    match (request.prefill.kv(), request.decode.kv()) {
        (Some(from), Some(to)) if from == to => format!(" in {from}"),
        (Some(from), Some(to)) => format!(" in {from} → {to}"),
        _ => String::new(),
    }
}

fn line(src: String, dst: String, cost: Cost) -> [String; 6] {
    [src, dst, number(cost.bytes), number(cost.runs), number(cost.copies), number(cost.flat)]
}

fn all_rows(answer: &Answer) -> String {
    let mut table = terminal::table();
    table.set_header([
        "layer",
        "part",
        "prefill\nrank",
        "prefill\nrow",
        "decode\nrank",
        "decode\nrow",
        "token",
    ]);
    for m in &answer.moves {
        for unit in m.plans.iter().flat_map(kvferry_plan::Plan::units) {
            for (token, src, dst) in unit.runs.iter().flat_map(Run::expand) {
                // State has no tokens.
                let token = if unit.part.is_state() { "-".into() } else { token.to_string() };
                table.add_row([
                    unit.layer.to_string(),
                    unit.part.to_string(),
                    m.src.to_string(),
                    src.to_string(),
                    m.dst.to_string(),
                    dst.to_string(),
                    token,
                ]);
            }
        }
    }
    // All but the part are numbers.
    for (_, column) in table.column_iter_mut().enumerate().filter(|(i, _)| *i != 1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}
