//! `POST /internal/decode`: takes a prompt's cache over and continues it, one JSON line a token.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use axum::{
    Json,
    body::Body,
    extract::{
        Path, Query, State,
        rejection::{JsonRejection, PathRejection, QueryRejection},
    },
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use kvferry_engine::{Answer, Event, FirstToken, Request, RoomLease};
use kvferry_node::{PeerAddr, Receipt, Receive};
use kvferry_plan::{Blame, Descriptor, Fit, Hold, InstanceId, Need, RoomKey, TokenRange};
use kvferry_registry::{Group, HEARTBEAT, Role, check_instance};
use kvferry_session::Prompt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    Chosen, DecodeDone, DecodeRecord, DecodeRequest, Problem, Stage, TraceContext, Transfer,
    admin::{self, Which},
    api,
    decline::{address, decline},
    instance::Shared,
    telemetry::{Phase, RoomTelemetry, Totals},
};

/// Lines that may wait for a client that reads slowly; then its request waits.
const BACKLOG: usize = 64;

pub(crate) async fn handle(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Result<Json<DecodeRequest>, JsonRejection>,
) -> Result<Response, Problem> {
    let Json(asked) = body?;
    let refuse = |problem| {
        decline(&shared, asked.key, &asked.prefill, &problem);
        problem
    };
    // Before anything is looked up, counted or logged under this name.
    check_instance(&asked.prefill.0)
        .map_err(|wrong| Problem::new(Blame::Caller, Stage::Request, format!("field `prefill`: {wrong}")))?;
    shared.admit().map_err(refuse)?;
    let seen = shared.telemetry.begin(asked.key, asked.prompt.len(), TraceContext::from_headers(&headers));
    seen.peer(&asked.prefill);
    let refuse = |problem| {
        seen.failed(&problem, false);
        refuse(problem)
    };
    let no_room = |error| refuse(Problem::engine(Stage::Admission, &error));
    // What makes no sense or can never fit is refused before the other side is even looked for; and what can never fit there,
    // before pages are taken on either.
    let request = request(&asked);
    shared.engine.check_reserve(&request).map_err(no_room)?;
    let prefill = find_prefill(&shared, &asked.prefill).await.map_err(refuse)?;
    let found = Instant::now();
    prefill_holds(&prefill, &asked).map_err(refuse)?;
    let granted = shared.engine.reserve(asked.key, request).map_err(no_room)?;
    let (lines, mut records) = mpsc::channel(BACKLOG);
    let span = seen.log_span();
    let room = Room { shared: Arc::clone(&shared), asked, prefill, found, lines, seen };
    shared.tasks.spawn(room.run(granted).instrument(span));
    // The status says how it went until the pages were there; what fails later is the stream's last line.
    let first = match records.recv().await {
        Some(DecodeRecord::Error(problem)) => return Err(problem),
        Some(record) => record,
        None => {
            let cause = "the room's task ended without a record; this is a defect, please report it";
            return Err(Problem::new(Blame::Us, Stage::Compute, cause));
        }
    };
    let body = stream::unfold((Some(first), records), |(first, mut records)| async move {
        let record = match first {
            Some(first) => first,
            None => records.recv().await?,
        };
        let mut line = serde_json::to_string(&record).unwrap_or_default();
        line.push('\n');
        Some((Ok::<_, Infallible>(line), (None, records)))
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response())
}

fn request(asked: &DecodeRequest) -> Request {
    Request {
        prompt: asked.prompt.clone(),
        max_tokens: asked.max_tokens,
        sampling: asked.sampling.into(),
        ignore_eos: asked.ignore_eos,
        top_logprobs: asked.top_logprobs,
        // Then its state after the prompt is kept too.
        hold: asked.hold.then_some(asked.key),
    }
}

async fn find_prefill(shared: &Shared, prefill: &InstanceId) -> Result<Group, Problem> {
    let group = shared.registry.lookup(prefill).await;
    let group = group.map_err(|error| Problem::new(error.blame(), Stage::Lookup, error))?;
    if group.role != Role::Prefill {
        let cause = format!("field `prefill`: {} is a {} instance", group.instance, group.role);
        return Err(Problem::new(Blame::Caller, Stage::Request, cause));
    }
    Ok(group)
}

/// Refuses a prompt that prefill can never hold. One that does not say what it can hold answers for itself.
fn prefill_holds(prefill: &Group, asked: &DecodeRequest) -> Result<(), Problem> {
    let Some(capacity) = prefill.members.first().and_then(|member| member.capacity.as_ref()) else {
        return Ok(());
    };
    let hold = Hold::Prompt(capacity.path(asked.ignore_eos));
    let need = Need { hold, prompt_tokens: asked.prompt.len() as u64, max_tokens: 1 };
    match capacity.fit(need, capacity.pages) {
        Fit::Now { .. } | Fit::Later { .. } => Ok(()),
        Fit::Never(limit) => {
            let cause = format!("prefill instance {}: {limit}", prefill.instance);
            Err(Problem::new(Blame::Caller, Stage::Admission, cause))
        }
    }
}

/// Whether a hand-off between the two changes an element type on the way.
fn converts(prefill: &Descriptor, decode: &Descriptor) -> bool {
    let dtype = |of: &Descriptor, part| of.placement.part(part).map(|layout| layout.dtype);
    decode.shape.parts.iter().any(|shape| dtype(prefill, shape.part) != dtype(decode, shape.part))
}

/// Ends an answer that is being generated as one that ended well: its asker has enough.
pub(crate) async fn enough(
    State(shared): State<Arc<Shared>>,
    room: Result<Path<String>, PathRejection>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<StatusCode, Problem> {
    let Query(which) = which?;
    let key = admin::key(room, &which)?;
    if shared.answers.enough(key) {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Problem::new(Blame::Caller, Stage::Request, format!("nothing is being generated in room {key}")))
}

/// Answers that are being generated, each with what ends it early and well.
#[derive(Debug, Default)]
pub(crate) struct Answers(Mutex<HashMap<RoomKey, CancellationToken>>);

impl Answers {
    fn lock(&self) -> MutexGuard<'_, HashMap<RoomKey, CancellationToken>> {
        // Every change is one insert or one remove.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, key: RoomKey) -> Generating<'_> {
        let enough = CancellationToken::new();
        self.lock().insert(key, enough.clone());
        Generating { answers: self, key, enough }
    }

    /// False when there is no answer of that key.
    fn enough(&self, key: RoomKey) -> bool {
        self.lock().get(&key).map(CancellationToken::cancel).is_some()
    }
}

/// An answer among others, until it is dropped.
struct Generating<'a> {
    answers: &'a Answers,
    key: RoomKey,
    enough: CancellationToken,
}

impl Drop for Generating<'_> {
    fn drop(&mut self) {
        self.answers.lock().remove(&self.key);
    }
}

struct Room {
    shared: Arc<Shared>,
    asked: DecodeRequest,
    /// Who computes the prompt, as the registry knew it at some time.
    prefill: Group,
    found: Instant,
    /// Closed when the client goes away.
    lines: mpsc::Sender<DecodeRecord>,
    seen: RoomTelemetry,
}

impl Room {
    async fn run(self, granted: Answer<RoomLease>) {
        let last = match self.take_over(granted).await {
            Ok((lease, done)) => {
                self.seen.completed(Totals { cached: done.prompt_tokens_cached, exposed: None });
                if self.asked.hold {
                    self.shared.hold(lease);
                }
                DecodeRecord::Done(done)
            }
            Err(problem) => {
                self.seen.failed(&problem, self.lines.is_closed());
                decline(&self.shared, self.asked.key, &self.asked.prefill, &problem);
                DecodeRecord::Error(problem)
            }
        };
        self.say(last).await;
    }

    async fn say(&self, record: DecodeRecord) {
        say(&self.lines, record, &self.shared.stop).await;
    }

    /// The lease goes back with the error: whatever happens, it lives until nobody writes into its pages any more.
    async fn take_over(&self, granted: Answer<RoomLease>) -> Result<(RoomLease, DecodeDone), Problem> {
        let mut lease = self.granted(granted).await?;
        self.seen.admitted();
        self.seen.enter(Phase::Pair);
        let prefill = tokio::select! {
            prefill = self.prefill_now() => prefill?,
            problem = self.ended(Stage::Lookup) => return Err(problem),
        };
        let decode = self.shared.engine.descriptor();
        if prefill.members.iter().any(|member| converts(&member.descriptor, &decode)) {
            lease = self.set_apart(lease).await?;
        }
        let peers = prefill.members.into_iter().map(address).collect();
        // The prompt's pages are here before any are taken at prefill: no two rooms wait for each other crosswise.
        self.say(DecodeRecord::Reserved { cached_tokens: lease.cached() }).await;
        let receipt = self.receive(peers, &lease).await?;
        self.seen.received();
        self.seen.enter(Phase::Compute);
        let done = self.generate(&lease, &receipt).await?;
        Ok((lease, done))
    }

    async fn granted(&self, granted: Answer<RoomLease>) -> Result<RoomLease, Problem> {
        tokio::select! {
            granted = granted => granted.map_err(|error| Problem::engine(Stage::Admission, &error)),
            problem = self.ended(Stage::Admission) => Err(problem),
            problem = self.shared.waited(self.asked.prompt.len()) => Err(problem),
        }
    }

    /// Rows that are converted on the way are neither those that this engine, nor those that another prefill instance would
    /// compute: they do not go on from a cached prefix and do not become one.
    async fn set_apart(&self, lease: RoomLease) -> Result<RoomLease, Problem> {
        if lease.cached() == 0 {
            lease.set_apart();
            return Ok(lease);
        }
        // Nobody knows of these pages yet.
        drop(lease);
        let granted = self.shared.engine.reserve_apart(self.asked.key, request(&self.asked));
        self.granted(granted.map_err(|error| Problem::engine(Stage::Admission, &error))?).await
    }

    /// Comes true when nobody wants the answer any more.
    async fn ended(&self, stage: Stage) -> Problem {
        tokio::select! {
            () = self.lines.closed() => Problem::new(Blame::Caller, stage, "the client went away"),
            () = self.shared.stop.cancelled() => Problem::new(Blame::Environment, stage, "shutting down"),
        }
    }

    /// Who computes the prompt. While the request waited for its pages it may have started again.
    async fn prefill_now(&self) -> Result<Group, Problem> {
        if self.found.elapsed() < HEARTBEAT {
            return Ok(self.prefill.clone());
        }
        find_prefill(&self.shared, &self.asked.prefill).await
    }

    async fn receive(&self, peers: Vec<PeerAddr>, lease: &RoomLease) -> Result<Receipt, Problem> {
        // What an earlier request left here is not moved again.
        let tokens = TokenRange::new(lease.cached(), self.asked.prompt.len() as u64);
        let (table, slot) = (lease.table().clone(), lease.slot());
        let prompt = Some(Prompt::of(&self.asked.prompt));
        let room = Receive { key: self.asked.key, peers, table, slot, tokens, prompt, transport: None };
        let handle = self.shared.node.receive(room);
        tokio::select! {
            outcome = handle.outcome() => {
                outcome.map_err(|error| Problem::room(&error))
            }
            problem = self.ended(Stage::HandOff) => {
                handle.abort(&problem.cause);
                // Only the outcome says that nobody writes into the pages any more.
                let _ = handle.outcome().await;
                Err(problem)
            }
        }
    }

    async fn generate(&self, lease: &RoomLease, receipt: &Receipt) -> Result<DecodeDone, Problem> {
        let asked = &self.asked;
        let first = FirstToken { id: receipt.first.token, logprob: receipt.first.logprob, top: Vec::new() };
        let mut events = self
            .shared
            .engine
            .decode(lease, first)
            .map_err(|error| Problem::engine(Stage::Compute, &error))?;
        // The engine has one room of a key: nobody else is there under this one.
        let generating = self.shared.answers.begin(asked.key);
        let mut enough = false;
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = generating.enough.cancelled(), if !enough => {
                    enough = true;
                    events.enough();
                    continue;
                }
                problem = self.ended(Stage::Compute) => return Err(problem),
            };
            match event {
                Some(Event::Token { id, logprob, top }) => {
                    self.seen.token();
                    self.say(DecodeRecord::Token(Chosen { id, logprob, top })).await;
                }
                Some(Event::Done { reason, prompt_tokens_computed, prompt_tokens_cached }) => {
                    return Ok(DecodeDone {
                        reason: api::reason(reason).into(),
                        prompt_tokens: asked.prompt.len() as u64,
                        prompt_tokens_computed,
                        prompt_tokens_cached,
                        transfer: Transfer {
                            transport: receipt.transport.to_string(),
                            transport_why: receipt.why.clone(),
                            bytes: receipt.bytes,
                            planned_bytes: receipt.planned_bytes,
                            runs: receipt.copies,
                            seconds: receipt.seconds,
                        },
                    });
                }
                Some(Event::Failed(error)) => return Err(Problem::engine(Stage::Compute, &error)),
                Some(_) => {}
                None => {
                    return Err(Problem::new(Blame::Environment, Stage::Compute, "the engine has stopped"));
                }
            }
        }
    }
}

/// Tells a client, who may be slow or gone; one that never reads does not keep a process that has to end.
async fn say(lines: &mpsc::Sender<DecodeRecord>, record: DecodeRecord, stop: &CancellationToken) {
    tokio::select! {
        // A client that went away is seen by the next turn.
        _ = lines.send(record) => {}
        () = stop.cancelled() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_never_reads_does_not_keep_a_process_that_stops() {
        let (lines, mut records) = mpsc::channel(1);
        let token = |id| DecodeRecord::Token(Chosen { id, logprob: -1.0, top: Vec::new() });
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            say(&lines, token(1), &stop).await;
            let blocked = say(&lines, token(2), &stop);
            tokio::pin!(blocked);
            let briefly = std::time::Duration::from_millis(20);
            assert!(tokio::time::timeout(briefly, &mut blocked).await.is_err(), "the reader is waited for");
            stop.cancel();
            blocked.await;
            assert_eq!(records.recv().await, Some(token(1)));
        });
    }
}
