//! `kvferry plan`: whether two layouts can be served together, what crosses, and why not.
//!
//! Answers from the planner alone: no model, no memory, no peer. What the engine cannot run yet is planned too.

mod answer;
mod args;
mod capacity;
mod json;
mod request;
mod shape;
mod svg;
mod text;

use std::process::ExitCode;

use kvferry_plan::{Blame, Unsupported};

use crate::failure::Failure;
use crate::terminal;
use answer::Answer;
pub(crate) use args::PlanArgs;
use request::Request;

/// Rows that `--rows` prints at most.
const MAX_ROWS: u64 = 100_000;

/// What the command has to say.
struct Said {
    text: String,
    supported: bool,
}

/// Answers on standard output. Exit status 0: supported; 1: not; 2 (by the failure): the request makes no sense.
pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let said = answer(args)?;
    terminal::piece(said.text);
    Ok(ExitCode::from(u8::from(!said.supported)))
}

fn answer(args: &PlanArgs) -> Result<Said, Failure> {
    let request = Request::read(args)?;
    if args.capacity {
        return match capacity::Answer::to(&request, args) {
            Ok(answer) if args.json => Ok(Said { text: answer.json(&request)?, supported: true }),
            Ok(answer) => Ok(Said { text: answer.text(&request, args), supported: true }),
            Err(refusal) => refused(args, &request, &refusal),
        };
    }
    let answer = match Answer::to(&request) {
        Ok(answer) => answer,
        Err(refusal) => return refused(args, &request, &refusal),
    };
    if args.rows && answer.rows() > MAX_ROWS {
        return Err(Failure::caller(format_args!(
            "--rows would print {} rows; {} are the most: plan fewer tokens or layers",
            terminal::number(answer.rows()),
            terminal::number(MAX_ROWS)
        )));
    }
    if let Some(file) = &args.svg {
        let drawing = svg::draw(&request, &answer)?;
        std::fs::write(file, drawing).map_err(|e| {
            // As for a request that cannot be read: status 1 says that the pair is not supported, nothing else.
            Failure::caller(format_args!("cannot write {}: {e}", file.display()))
        })?;
    }
    let text = match args.json {
        true => json::answer(&request, &answer, args.rows)?,
        false => text::answer(&request, &answer, args.rows),
    };
    Ok(Said { text, supported: true })
}

fn refused(args: &PlanArgs, request: &Request, refusal: &Unsupported) -> Result<Said, Failure> {
    if refusal.blame() == Blame::Caller {
        return Err(Failure::caller(refusal));
    }
    let text = match args.json {
        true => json::refusal(request, refusal)?,
        false => text::refusal(request, refusal),
    };
    Ok(Said { text, supported: false })
}

#[cfg(test)]
mod tests;
