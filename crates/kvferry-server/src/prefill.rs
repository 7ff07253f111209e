//! `POST /internal/prefill`: computes a prompt and hands its cache over.

use std::{sync::Arc, time::Instant};

use axum::{
    Json,
    extract::{State, rejection::JsonRejection},
    http::HeaderMap,
};
use kvferry_engine::{Answer, EngineError, Request, RoomLease};
use kvferry_node::SourceRoom;
use kvferry_plan::{Blame, RoomKey, TokenRange};
use kvferry_session::Prompt;
use tokio::sync::oneshot;

use tracing::Instrument;

use crate::{
    PrefillReply, PrefillRequest, Problem, Stage, TraceContext,
    decline::withhold,
    instance::Shared,
    telemetry::{Phase, RoomTelemetry, Totals},
};

pub(crate) async fn handle(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Result<Json<PrefillRequest>, JsonRejection>,
) -> Result<Json<PrefillReply>, Problem> {
    let Json(asked) = body?;
    let (key, prompt_tokens) = (asked.key, asked.prompt.len() as u64);
    let seen = shared.telemetry.begin(key, asked.prompt.len(), TraceContext::from_headers(&headers));
    let refused = |seen: &RoomTelemetry, error| {
        let problem = Problem::engine(Stage::Admission, &error);
        seen.failed(&problem, false);
        problem
    };
    if !shared.handoff.expect(key) {
        return Err(refused(&seen, EngineError::RoomInUse(key)));
    }
    let refuse = |problem| {
        withhold(&shared, key, &problem);
        shared.handoff.forget(key);
        problem
    };
    shared.admit().map_err(|problem| {
        seen.failed(&problem, false);
        refuse(problem)
    })?;
    let prompt = Prompt::of(&asked.prompt);
    let request = Request {
        sampling: asked.sampling.into(),
        top_logprobs: asked.top_logprobs,
        ignore_eos: asked.ignore_eos,
        ..Request::greedy(asked.prompt, 1)
    };
    let granted = shared.engine.prefill(key, request).map_err(|error| refuse(refused(&seen, error)))?;
    let (reply, answer) = oneshot::channel();
    // The room outlives a client that goes away: its pages may be read until the other side has let go.
    let room =
        Room { shared: Arc::clone(&shared), key, prompt_tokens, prompt, started: Instant::now(), seen };
    let span = room.seen.log_span();
    shared.tasks.spawn(room.run(granted, reply).instrument(span));
    answer
        .await
        .unwrap_or_else(|_| {
            Err(Problem::new(Blame::Us, Stage::Compute, "the room's task ended without an answer"))
        })
        .map(Json)
}

struct Room {
    shared: Arc<Shared>,
    key: RoomKey,
    prompt_tokens: u64,
    prompt: Prompt,
    started: Instant,
    seen: RoomTelemetry,
}

impl Room {
    async fn run(
        self,
        granted: Answer<RoomLease>,
        mut reply: oneshot::Sender<Result<PrefillReply, Problem>>,
    ) {
        let result = self.hand_over(granted, &mut reply).await;
        match &result {
            Ok(done) => self
                .seen
                .completed(Totals { cached: done.prompt_tokens_cached, exposed: Some(done.exposed_seconds) }),
            Err(problem) => self.seen.failed(problem, reply.is_closed()),
        }
        // A client that has gone away does not read it.
        let _ = reply.send(result);
    }

    async fn hand_over(
        &self,
        granted: Answer<RoomLease>,
        reply: &mut oneshot::Sender<Result<PrefillReply, Problem>>,
    ) -> Result<PrefillReply, Problem> {
        let Shared { node, handoff, stop, .. } = &*self.shared;
        let key = self.key;
        let gone = || Problem::new(Blame::Caller, Stage::Admission, "the client went away");
        let lease = tokio::select! {
            granted = granted => granted.map_err(|error| Problem::engine(Stage::Admission, &error)),
            () = reply.closed() => Err(gone()),
            () = stop.cancelled() => Err(Problem::new(Blame::Environment, Stage::Admission, "shutting down")),
            problem = self.shared.waited(self.prompt_tokens as usize) => Err(problem),
        };
        let tokens = TokenRange::new(0, self.prompt_tokens);
        let lease = match lease {
            Ok(lease) => lease,
            Err(problem) => {
                withhold(&self.shared, key, &problem);
                handoff.forget(key);
                return Err(problem);
            }
        };
        self.seen.admitted();
        self.seen.enter(Phase::Compute);
        self.seen.enter(Phase::Pair);
        let handle = Arc::new(node.send(SourceRoom {
            key,
            table: lease.table().clone(),
            slot: lease.slot(),
            tokens,
            prompt: Some(self.prompt),
        }));
        handoff.attach(key, &handle);
        let outcome = tokio::select! {
            outcome = handle.outcome() => outcome,
            () = reply.closed() => {
                handle.abort("the client of prefill went away");
                handle.outcome().await
            }
            () = stop.cancelled() => {
                handle.abort("prefill is shutting down");
                handle.outcome().await
            }
        };
        // The outcome says that nobody reads the pages any more.
        let computed = handoff.forget(key);
        let prompt_tokens_cached = lease.cached();
        drop(lease);
        match (outcome, computed) {
            (Ok(receipt), Some(Ok(first))) => Ok(PrefillReply {
                first: first.into(),
                prompt_tokens: self.prompt_tokens,
                prompt_tokens_cached,
                exposed_seconds: receipt.exposed_seconds,
                seconds: self.started.elapsed().as_secs_f64(),
            }),
            (Err(_), Some(Err(error))) => Err(Problem::engine(Stage::Compute, &error)),
            (Err(error), _) => Err(Problem::room(&error)),
            (Ok(_), _) => {
                let cause =
                    "the room was completed without a first token; this is a defect, please report it";
                Err(Problem::new(Blame::Us, Stage::Compute, cause))
            }
        }
    }
}
