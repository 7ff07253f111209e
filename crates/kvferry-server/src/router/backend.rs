//! Continuations from pairs of instances.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use kvferry_plan::{Attempt, Blame, Fit, InstanceId, Limit, RoomId, RoomKey};

use super::{
    choice::{Candidate, choose},
    seat::{Booking, Seat},
    view::{Match, Snapshot, View},
};
use crate::{
    DecodeRequest, InstancePair, PairAnswer, PairEvent, Problem, Stage,
    api::Reach,
    backend::{Answer, Backend, Finish, Job, Piece},
    telemetry::{RoomTelemetry, Telemetry, Totals},
};

/// Pairs that are tried for one request, if nothing was begun at those before.
const ATTEMPTS: u32 = 3;
/// A request that is older has waited for something: it is not tried again.
const YOUNG: Duration = Duration::from_secs(2);

/// Pairs of instances as a backend.
#[derive(Debug)]
pub(super) struct Pairs {
    pub(super) view: View,
    pub(super) draining: AtomicBool,
    /// Held from looking at the loads until the request is counted, so that two do not choose the same idle pair.
    choosing: Mutex<()>,
    /// Rooms under way.
    rooms: Arc<AtomicUsize>,
    pub(super) telemetry: Arc<Telemetry>,
}

/// A room that is counted.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pair that was chosen, with what the request is counted for.
struct Chosen {
    pair: InstancePair,
    seats: [Arc<Seat>; 2],
    max_tokens: u32,
    prefill: Booking,
    decode: Booking,
}

/// An answer under way. The request counts for prefill until the first token is there, for decode until the end.
struct Running {
    answer: PairAnswer,
    prefill: Option<Booking>,
    _decode: Booking,
    _counted: Counted,
    seen: RoomTelemetry,
}

impl Pairs {
    pub(super) fn new(view: View, telemetry: Arc<Telemetry>) -> Self {
        Self {
            view,
            draining: AtomicBool::new(false),
            choosing: Mutex::default(),
            rooms: Arc::default(),
            telemetry,
        }
    }

    pub(super) fn rooms(&self) -> usize {
        self.rooms.load(Ordering::Relaxed)
    }

    async fn begin(&self, job: Job) -> Result<Answer, Problem> {
        let (room, began) = (mint()?, Instant::now());
        let mut avoid: Vec<InstanceId> = Vec::new();
        let mut attempt = 0;
        loop {
            let snapshot = self.view.snapshot()?;
            let chosen = self.choose(&snapshot, &job, &avoid)?;
            let key = RoomKey { room, attempt: Attempt(attempt) };
            let seats = chosen.seats.clone();
            tracing::debug!(%key, prefill = %seats[0].instance, decode = %seats[1].instance, "room");
            let problem = match self.first(chosen, &job, key).await {
                Ok(answer) => return Ok(answer),
                Err(problem) => vanished(&seats[0].instance, problem),
            };
            doubt(&seats, &problem);
            attempt += 1;
            let at = seats.iter().find(|seat| Some(&seat.instance) == problem.instance.as_ref());
            let Some(seat) = at.filter(|_| nothing_begun(&problem)) else { return Err(problem) };
            if problem.reach == Reach::Refused {
                tracing::warn!(instance = %seat.instance, %problem, "left out until it starts again");
                seat.leave_out();
            }
            avoid.push(seat.instance.clone());
            // Better the first reason than that nobody is left.
            if attempt == ATTEMPTS || began.elapsed() > YOUNG || self.choose(&snapshot, &job, &avoid).is_err()
            {
                return Err(problem);
            }
        }
    }

    /// Drives a room to its first token, so that a failure can still be a status.
    async fn first(&self, chosen: Chosen, job: &Job, key: RoomKey) -> Result<Answer, Problem> {
        let Chosen { mut pair, seats, max_tokens, prefill, decode } = chosen;
        let seen = self.telemetry.begin(key, job.prompt.len(), None);
        seen.peer(&pair.decode.instance);
        for leg in [&mut pair.prefill, &mut pair.decode] {
            leg.client = leg.client.traced(seen.context());
        }
        self.rooms.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(Arc::clone(&self.rooms));
        let request = DecodeRequest {
            key,
            prefill: pair.prefill.instance.clone(),
            prompt: job.prompt.to_vec(),
            max_tokens,
            sampling: job.sampling,
            top_logprobs: job.top_logprobs,
            ignore_eos: job.ignore_eos,
            hold: false,
        };
        let answer = pair.open(request).await.inspect_err(|problem| seen.failed(problem, false))?;
        let mut running =
            Running { answer, prefill: Some(prefill), _decode: decode, _counted: counted, seen };
        let first = running.next().await?;
        let rest = stream::unfold(Some((running, seats)), |running| async move {
            let (mut running, seats) = running?;
            let piece = running.next().await;
            if let Err(problem) = &piece {
                doubt(&seats, problem);
            }
            let more = matches!(piece, Ok(Piece::Token(_)));
            Some((piece, more.then_some((running, seats))))
        });
        Ok(stream::once(std::future::ready(Ok(first))).chain(rest).boxed())
    }

    /// The pair for a job, by the rule of [`choose`].
    fn choose(&self, snapshot: &Snapshot, job: &Job, avoid: &[InstanceId]) -> Result<Chosen, Problem> {
        let (prompt, wanted) = (job.prompt.len() as u64, job.max_tokens);
        let _choosing = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let avoided = |seat: &Seat| avoid.contains(&seat.instance);
        let mut all = snapshot.matches()?;
        all.retain(|found| !avoided(&found.prefill) && !avoided(&found.decode));
        let held = holding(&all, prompt, wanted)?;
        let candidates: Vec<Candidate<'_>> = held
            .iter()
            .map(|(found, prefill, decode)| Candidate {
                names: (&found.prefill.instance.0, &found.decode.instance.0),
                cost: found.cost,
                prefill: found.prefill.load(),
                decode: found.decode.load(),
                doubted: found.prefill.is_doubted() || found.decode.is_doubted(),
                waits: (decode.waits, prefill.waits),
            })
            .collect();
        let chosen = choose(&candidates).and_then(|index| held.get(index));
        let Some((found, prefill, decode)) = chosen else {
            let cause = "every instance that could serve this has been tried";
            return Err(Problem::new(Blame::Environment, Stage::Lookup, cause));
        };
        let tokens = prompt.saturating_add(decode.max_tokens.into());
        Ok(Chosen {
            pair: InstancePair { prefill: found.prefill.leg(), decode: found.decode.leg() },
            seats: [Arc::clone(&found.prefill), Arc::clone(&found.decode)],
            max_tokens: wanted,
            prefill: found.prefill.book(prompt, prefill.pages),
            decode: found.decode.book(tokens, decode.pages),
        })
    }
}

/// How a side would hold a request.
#[derive(Clone, Copy)]
struct Held {
    pages: u32,
    max_tokens: u32,
    waits: bool,
}

/// The pairs that can hold a request now or later.
///
/// # Errors
/// When none ever can: the limit of the side that comes nearest.
fn holding<'a>(
    matches: &[&'a Match],
    prompt: u64,
    max_tokens: u32,
) -> Result<Vec<(&'a Match, Held, Held)>, Problem> {
    let (mut held, mut nearest) = (Vec::new(), None::<(&Seat, Limit)>);
    for found in matches {
        let ask = |seat: &'a Seat| side(seat, prompt, max_tokens).map_err(|limit| (seat, limit));
        match ask(&found.prefill).and_then(|prefill| Ok((prefill, ask(&found.decode)?))) {
            Ok((prefill, decode)) => held.push((*found, prefill, decode)),
            Err((seat, limit)) => {
                if nearest.as_ref().is_none_or(|(_, other)| limit.limit > other.limit) {
                    nearest = Some((seat, limit));
                }
            }
        }
    }
    match nearest {
        Some((seat, limit)) if held.is_empty() => {
            let cause = format!("{} instance {}: {limit}", seat.role, seat.instance);
            Err(Problem::new(Blame::Caller, Stage::Admission, cause))
        }
        _ => Ok(held),
    }
}

fn side(seat: &Seat, prompt: u64, max_tokens: u32) -> Result<Held, Limit> {
    match seat.fit(prompt, max_tokens) {
        Fit::Now { pages, max_tokens } => Ok(Held { pages, max_tokens, waits: false }),
        Fit::Later { pages, max_tokens } => Ok(Held { pages, max_tokens, waits: true }),
        Fit::Never(limit) => Err(limit),
    }
}

/// Prefers others for a while when one of two did not do its part: which one, only time tells.
fn doubt(seats: &[Arc<Seat>; 2], problem: &Problem) {
    if problem.blame == Blame::PeerMisbehaved {
        seats.iter().for_each(|seat| seat.doubt());
    }
}

/// Decode does not find the prefill instance that was chosen here: it has gone since. That is not the client's mistake,
/// and not decode's fault.
fn vanished(prefill: &InstanceId, problem: Problem) -> Problem {
    match (problem.reach, problem.stage, problem.blame) {
        (Reach::Answered, Stage::Lookup, Blame::Caller) => {
            Problem { blame: Blame::Environment, instance: Some(prefill.clone()), status: None, ..problem }
        }
        _ => problem,
    }
}

/// Whether another pair may be asked instead: the instance was not reached, takes no more for now, or does not find the
/// other one.
fn nothing_begun(problem: &Problem) -> bool {
    matches!(
        (problem.reach, problem.stage, problem.blame),
        (Reach::Refused, ..)
            | (Reach::Answered, Stage::Admission, Blame::Environment)
            | (Reach::Answered, Stage::Lookup, Blame::Environment)
    )
}

impl Running {
    async fn next(&mut self) -> Result<Piece, Problem> {
        let piece = self.read().await;
        match &piece {
            Ok(Piece::Token(_)) => self.seen.token(),
            Ok(Piece::Finish(finish)) => {
                self.seen.completed(Totals { cached: finish.cached_tokens, exposed: None });
            }
            Err(problem) => self.seen.failed(problem, false),
        }
        piece
    }

    async fn read(&mut self) -> Result<Piece, Problem> {
        match self.answer.next().await? {
            Some(PairEvent::Token(token)) => {
                self.prefill = None;
                Ok(Piece::Token(token))
            }
            Some(PairEvent::Done(done)) => Ok(Piece::Finish(Finish {
                eos: done.decode.reason == "eos",
                cached_tokens: done.prefill.map_or(0, |reply| reply.prompt_tokens_cached),
            })),
            None => Err(Problem::new(Blame::Us, Stage::Compute, "an answer ended twice; this is a defect")),
        }
    }
}

impl Backend for Pairs {
    fn start(&self, job: Job) -> Pin<Box<dyn Future<Output = Result<Answer, Problem>> + Send + '_>> {
        Box::pin(self.begin(job))
    }

    fn check(&self, prompt_tokens: u64, max_tokens: u32) -> Result<(), Problem> {
        let snapshot = self.view.snapshot()?;
        holding(&snapshot.matches()?, prompt_tokens, max_tokens).map(drop)
    }

    fn ready(&self) -> Result<(), Problem> {
        if self.draining.load(Ordering::Relaxed) {
            let cause = "the router is shutting down; ask another one";
            return Err(Problem::new(Blame::Environment, Stage::Admission, cause));
        }
        self.view.snapshot()?.matches().map(drop)
    }
}

/// A room id that nobody can guess or meet twice.
fn mint() -> Result<RoomId, Problem> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| {
        Problem::new(Blame::Environment, Stage::Request, format!("no randomness for a room id: {e}"))
    })?;
    Ok(RoomId(u128::from_ne_bytes(id)))
}
