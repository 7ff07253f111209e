//! An answer as server-sent events: one `data:` line per chunk, then `[DONE]`; an error object instead where it fails
//! after the first token.

use std::{collections::HashSet, convert::Infallible};

use axum::{
    body::Body,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;

use super::{choice::Delta, error::ApiError, run::Run, shape::Shape};
use crate::Problem;

/// Answers when the first token is there, so that a failure before it has its own HTTP status.
pub(crate) async fn respond(mut run: Run, shape: Shape) -> Result<Response, ApiError> {
    let first = run.next().await.map_err(|problem| told(problem, &shape))?;
    let events = Events { run, shape, first: Some(first), begun: HashSet::new(), over: false };
    let body = stream::unfold(events, |mut events| async move {
        let text = events.next().await?;
        Some((Ok::<_, Infallible>(text), events))
    });
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(body)).into_response())
}

fn told(problem: Problem, shape: &Shape) -> ApiError {
    ApiError::computing(problem, shape.wanted().kind.prompt_field())
}

struct Events {
    run: Run,
    shape: Shape,
    /// What the status waited for.
    first: Option<Option<Delta>>,
    /// Continuations of which something was told.
    begun: HashSet<usize>,
    over: bool,
}

impl Events {
    /// The next events as text; `None` after the last.
    async fn next(&mut self) -> Option<String> {
        if self.over {
            return None;
        }
        let next = match self.first.take() {
            Some(first) => Ok(first),
            None => self.run.next().await,
        };
        Some(match next {
            Ok(Some(delta)) => {
                let begins = self.begun.is_empty();
                let first = self.begun.insert(delta.index);
                self.shape.chunks(delta, first, begins).iter().map(event).collect()
            }
            Ok(None) => {
                self.over = true;
                let usage =
                    self.shape.wanted().include_usage.then(|| event(&self.shape.usage(self.run.usage())));
                usage.unwrap_or_default() + "data: [DONE]\n\n"
            }
            Err(problem) => {
                self.over = true;
                format!("data: {}\n\n", told(problem, &self.shape).json())
            }
        })
    }
}

/// JSON has no line ends of its own.
fn event(chunk: &impl Serialize) -> String {
    format!("data: {}\n\n", serde_json::to_string(chunk).unwrap_or_default())
}
