//! Continuations from pairs of instances.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use kvferry_plan::{Attempt, Blame, Fit, InstanceId, Limit, RoomKey};

use super::{
    choice::{Candidate, choose},
    seat::{Booking, Seat},
    view::{Match, Snapshot, View},
};
use crate::{
    DecodeRequest, InstancePair, PairAnswer, PairDone, PairEvent, Problem, Stage,
    api::Reach,
    backend::{Answer, Backend, Extent, Finish, Job, Piece},
    pair::mint_room,
    telemetry::{RoomTelemetry, Telemetry, Totals},
};

/// Pairs that are tried for one request, as long as its client has heard nothing.
const ATTEMPTS: u32 = 3;
/// An instance that takes longer to say that it takes no more has let the request wait for pages: it is not to wait again.
const SOON: Duration = Duration::from_secs(2);

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
    seats: [Arc<Seat>; 2],
    /// A piece that was waited for and not told yet.
    first: Option<Piece>,
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

    async fn begin(&self, job: Job) -> Result<Running, Problem> {
        let (room, mut tried) = (mint_room()?, Tried::default());
        let mut attempt = 0;
        loop {
            let began = Instant::now();
            let snapshot = self.view.snapshot()?;
            let chosen = self.choose(&snapshot, &job, &tried)?;
            let key = RoomKey { room, attempt: Attempt(attempt) };
            let seats = chosen.seats.clone();
            tracing::debug!(%key, prefill = %seats[0].instance, decode = %seats[1].instance, "room");
            let problem = match self.first(chosen, &job, key).await {
                Ok(answer) => return Ok(answer),
                Err(problem) => vanished(&seats[0].instance, problem),
            };
            doubt(&seats, &problem);
            if problem.reach == Reach::Refused
                && let Some(seat) =
                    seats.iter().find(|seat| Some(&seat.instance) == problem.instance.as_ref())
            {
                tracing::warn!(instance = %seat.instance, %problem, "left out until it starts again");
                seat.leave_out();
            }
            attempt += 1;
            tried.note(&seats, &problem);
            // Better this reason than that nobody is left.
            if attempt == ATTEMPTS
                || !elsewhere(&problem, began.elapsed())
                || self.view.snapshot().and_then(|now| self.choose(&now, &job, &tried)).is_err()
            {
                return Err(problem);
            }
            tracing::info!(%key, %problem, "another pair is asked");
        }
    }

    /// Drives a room to its first token, so that a failure can still be a status.
    async fn first(&self, chosen: Chosen, job: &Job, key: RoomKey) -> Result<Running, Problem> {
        let Chosen { mut pair, seats, max_tokens, prefill, decode } = chosen;
        let seen = self.telemetry.begin(key, job.prompt.len(), job.trace);
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
        let prefill = Some(prefill);
        let mut running =
            Running { answer, prefill, _decode: decode, _counted: counted, seen, seats, first: None };
        running.first = Some(running.piece().await?);
        Ok(running)
    }

    /// The pair for a job, by the rule of [`choose`].
    fn choose(&self, snapshot: &Snapshot, job: &Job, tried: &Tried) -> Result<Chosen, Problem> {
        let extent = job.extent();
        let _choosing = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = snapshot.matches()?;
        all.retain(|found| !tried.has(found));
        let held = holding(&all, extent)?;
        let candidates: Vec<Candidate<'_>> = held
            .iter()
            .map(|(found, prefill, decode)| Candidate {
                names: (&found.prefill.instance.0, &found.decode.instance.0),
                cost: found.fitting.cost,
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
        let tokens = extent.prompt_tokens.saturating_add(decode.max_tokens.into());
        Ok(Chosen {
            pair: InstancePair { prefill: found.prefill.leg(), decode: found.decode.leg() },
            seats: [Arc::clone(&found.prefill), Arc::clone(&found.decode)],
            max_tokens: extent.max_tokens,
            prefill: found.prefill.book(extent.prompt_tokens, prefill.pages),
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
fn holding<'a>(matches: &[&'a Match], extent: Extent) -> Result<Vec<(&'a Match, Held, Held)>, Problem> {
    let (mut held, mut nearest) = (Vec::new(), None::<(&Seat, Limit)>);
    for found in matches {
        let ask = |seat: &'a Seat| side(seat, extent).map_err(|limit| (seat, limit));
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

fn side(seat: &Seat, extent: Extent) -> Result<Held, Limit> {
    match seat.fit(extent) {
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

/// Whether another pair may do better than one that failed before its first token, after so long.
fn elsewhere(problem: &Problem, took: Duration) -> bool {
    match (problem.blame, problem.stage) {
        // A mistake goes along, and so may what met a defect.
        (Blame::Caller | Blame::Us, _) => false,
        (Blame::Environment, Stage::Admission) => took < SOON,
        _ => true,
    }
}

/// Where a request is not to go again.
#[derive(Debug, Default)]
struct Tried {
    /// They have said no.
    instances: Vec<InstanceId>,
    /// Something failed between the two: either may be well.
    pairs: Vec<[InstanceId; 2]>,
}

impl Tried {
    fn note(&mut self, seats: &[Arc<Seat>; 2], problem: &Problem) {
        let said_no = problem.reach == Reach::Answered
            && matches!(problem.stage, Stage::Admission | Stage::Lookup)
            && problem.blame == Blame::Environment;
        match &problem.instance {
            Some(instance) if said_no => self.instances.push(instance.clone()),
            _ => self.pairs.push(seats.clone().map(|seat| seat.instance.clone())),
        }
    }

    fn has(&self, found: &Match) -> bool {
        let names = [&found.prefill.instance, &found.decode.instance];
        names.iter().any(|name| self.instances.contains(name))
            || self.pairs.iter().any(|pair| pair.iter().eq(names))
    }
}

impl Running {
    async fn piece(&mut self) -> Result<Piece, Problem> {
        let piece = self.read().await;
        match &piece {
            Ok(Piece::Token(_)) => self.seen.token(),
            Ok(Piece::Finish(finish)) => self.completed(*finish),
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
            Some(PairEvent::Done(done)) => Ok(Piece::Finish(finish(&done))),
            None => Err(Problem::new(Blame::Us, Stage::Compute, "an answer ended twice; this is a defect")),
        }
    }

    fn completed(&self, finish: Finish) {
        self.seen.completed(Totals { cached: finish.cached_tokens, exposed: None });
    }
}

fn finish(done: &PairDone) -> Finish {
    Finish {
        eos: done.decode.reason == "eos",
        cached_tokens: done.prefill.as_ref().map_or(0, |reply| reply.prompt_tokens_cached),
    }
}

impl Answer for Running {
    fn next(&mut self) -> BoxFuture<'_, Result<Piece, Problem>> {
        Box::pin(async move {
            if let Some(first) = self.first.take() {
                return Ok(first);
            }
            let piece = self.piece().await;
            if let Err(problem) = &piece {
                doubt(&self.seats, problem);
            }
            piece
        })
    }

    fn enough(&mut self) -> BoxFuture<'_, Finish> {
        Box::pin(async move {
            // Whatever became of the rest, what was wanted is here.
            let finish = self.answer.enough().await.as_ref().map(finish).unwrap_or_default();
            self.completed(finish);
            finish
        })
    }
}

impl Backend for Pairs {
    fn start(&self, job: Job) -> BoxFuture<'_, Result<Box<dyn Answer>, Problem>> {
        Box::pin(async move { Ok(Box::new(self.begin(job).await?) as Box<dyn Answer>) })
    }

    fn check(&self, extent: Extent) -> Result<(), Problem> {
        let snapshot = self.view.snapshot()?;
        holding(&snapshot.matches()?, extent).map(drop)
    }

    fn ready(&self) -> Result<(), Problem> {
        if self.draining.load(Ordering::Relaxed) {
            let cause = "the router is shutting down; ask another one";
            return Err(Problem::new(Blame::Environment, Stage::Admission, cause));
        }
        self.view.snapshot()?.matches().map(drop)
    }
}
