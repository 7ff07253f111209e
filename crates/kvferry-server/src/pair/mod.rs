//! One room over two instances: decode is asked first, prefill once decode has its pages, and both have one end. Not for
//! choosing the instances.

use std::{future::Future, pin::Pin, time::Duration};

use kvferry_plan::{Blame, InstanceId, RoomId, RoomKey};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{
    Chosen, DecodeDone, DecodeRecord, DecodeRequest, DecodeStream, InstanceClient, PrefillReply,
    PrefillRequest, Problem, Stage, api::Reach,
};

/// How long the other side may take to say what it knows, after one side has failed with what may be a consequence.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// How long prefill's reply may lag behind what decode says: both come from the same verdict.
const REPLY: Duration = Duration::from_secs(1);
/// How long decode may be silent before it is asked whether it is alive.
const SILENCE: Duration = Duration::from_secs(2);
/// How long it may take to answer that.
const ALIVE: Duration = Duration::from_secs(3);

/// One of the two instances.
#[derive(Clone, Debug)]
pub struct Leg {
    /// Its name.
    pub instance: InstanceId,
    /// Speaks to it.
    pub client: InstanceClient,
}

/// The two instances of a room.
#[derive(Clone, Debug)]
pub struct InstancePair {
    /// Computes the prompt.
    pub prefill: Leg,
    /// Continues it.
    pub decode: Leg,
}

/// What comes of a room, in order: tokens, then the end.
#[derive(Clone, Debug, PartialEq)]
pub enum PairEvent {
    /// A generated token, the first one with its alternatives too.
    Token(Chosen),
    /// The room ended well.
    Done(PairDone),
}

/// What both sides say of a room that ended well.
#[derive(Clone, Debug, PartialEq)]
pub struct PairDone {
    /// Decode's words.
    pub decode: DecodeDone,
    /// Prefill's words; none when it was lost after it had handed everything over.
    pub prefill: Option<PrefillReply>,
}

/// A room id that nobody can guess or meet twice.
///
/// # Errors
/// When the system has no randomness.
pub fn mint_room() -> Result<RoomId, Problem> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| {
        let cause = format!("no randomness for a room id: {error}");
        Problem::new(Blame::Environment, Stage::Request, cause)
    })?;
    Ok(RoomId(u128::from_ne_bytes(id)))
}

impl InstancePair {
    /// Asks for a room; answers when decode has its pages. Prefill is asked with the first [`PairAnswer::next`]. The
    /// prefill that `request` names does not count: this pair's is put in. Dropping the future or the answer ends the
    /// room on both sides.
    ///
    /// # Errors
    /// What decode says before it has its pages; prefill has not been asked then.
    pub async fn open(&self, request: DecodeRequest) -> Result<PairAnswer, Problem> {
        let prefill = PrefillRequest {
            key: request.key,
            prompt: request.prompt.clone(),
            sampling: request.sampling,
            top_logprobs: request.top_logprobs,
            ignore_eos: request.ignore_eos,
        };
        let request = DecodeRequest { prefill: self.prefill.instance.clone(), ..request };
        let alternatives = request.top_logprobs > 0;
        let decode = &self.decode;
        let stream = tokio::select! {
            stream = decode.client.decode(&request) => stream,
            problem = silent(&decode.client) => Err(problem),
        };
        let decode = stream.map_err(|problem| told(problem, Stage::Admission, decode, &self.prefill))?;
        let client = self.prefill.client.clone();
        let asked = Box::pin(async move { client.prefill(&prefill).await });
        let pair = self.clone();
        let prefill = Prefill::Asked(asked);
        let key = request.key;
        Ok(PairAnswer { pair, key, decode, prefill, alternatives, held: None, begun: false, over: false })
    }
}

/// Prefill's part of a room.
enum Prefill {
    Asked(Pin<Box<dyn Future<Output = Result<PrefillReply, Problem>> + Send>>),
    Replied(PrefillReply),
    Failed(Problem),
    /// Given up, because the room has failed.
    Over,
}

impl Prefill {
    /// Comes true when it has an end; never when it had one before.
    async fn ended(&mut self) {
        let Self::Asked(asked) = self else { return std::future::pending().await };
        *self = match asked.await {
            Ok(reply) => Self::Replied(reply),
            Err(problem) => Self::Failed(problem),
        };
    }

    fn is_asked(&self) -> bool {
        matches!(self, Self::Asked(_))
    }
}

/// A room's answer as it comes.
pub struct PairAnswer {
    pair: InstancePair,
    key: RoomKey,
    decode: DecodeStream,
    prefill: Prefill,
    /// The first token's alternatives are wanted, and come from prefill.
    alternatives: bool,
    /// A record of decode that waits for prefill's reply, and until when.
    held: Option<(PairEvent, Instant)>,
    /// A token was told: the hand-off is over.
    begun: bool,
    over: bool,
}

impl std::fmt::Debug for PairAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PairAnswer").field("pair", &self.pair).field("over", &self.over).finish()
    }
}

impl PairAnswer {
    /// The next event; `None` after the last. May be dropped and called again.
    ///
    /// # Errors
    /// The first failure of either side, with stage, cause and instance. It is the last event; dropping the answer then
    /// ends what is left of the room.
    pub async fn next(&mut self) -> Result<Option<PairEvent>, Problem> {
        if self.over {
            return Ok(None);
        }
        let event = self.step().await;
        self.over = !matches!(event, Ok(PairEvent::Token(_)));
        if event.is_err() {
            // The other side hears of it now, not when somebody drops this.
            self.prefill = Prefill::Over;
            self.decode.close();
        }
        event.map(Some)
    }

    /// Says that the tokens so far are enough: decode ends the room as one that ended well. What both sides say of it; none
    /// when it had ended before, or they do not say it soon. Then, as always, dropping the answer ends what is left.
    pub async fn enough(&mut self) -> Option<PairDone> {
        let ended = async {
            // One that does not know the room has just ended it by itself: what it says is on its way.
            let _ = self.pair.decode.client.enough(self.key).await;
            loop {
                match self.next().await {
                    Ok(Some(PairEvent::Token(_))) => {}
                    Ok(Some(PairEvent::Done(done))) => return Some(done),
                    Ok(None) | Err(_) => return None,
                }
            }
        };
        timeout(REPLY, ended).await.ok().flatten()
    }

    async fn step(&mut self) -> Result<PairEvent, Problem> {
        loop {
            if let Some((_, until)) = &self.held {
                tokio::select! {
                    () = self.prefill.ended() => {}
                    () = sleep_until(*until) => {}
                    // It ended before.
                    () = std::future::ready(()), if !self.prefill.is_asked() => {}
                }
                return self.complete();
            }
            if let (Prefill::Failed(problem), false) = (&self.prefill, self.begun) {
                let problem = self.of_prefill(problem);
                if let Some(verdict) = self.prefill_failed(problem).await {
                    return Err(verdict);
                }
            }
            tokio::select! {
                biased;
                record = self.decode.next() => match record {
                    Ok(Some(DecodeRecord::Reserved { .. })) => {}
                    Ok(Some(DecodeRecord::Token(token))) => {
                        let first = !std::mem::replace(&mut self.begun, true);
                        if !(first && self.alternatives) {
                            return Ok(PairEvent::Token(token));
                        }
                        self.hold(PairEvent::Token(token));
                    }
                    Ok(Some(DecodeRecord::Done(decode))) => {
                        self.hold(PairEvent::Done(PairDone { decode, prefill: None }));
                    }
                    Ok(Some(DecodeRecord::Error(problem))) | Err(problem) => {
                        return Err(self.decode_failed(problem).await);
                    }
                    Ok(None) => {
                        let cause = "the decode stream ended without an end";
                        let problem = Problem::new(Blame::PeerMisbehaved, Stage::Compute, cause);
                        return Err(self.decode_failed(Problem { reach: Reach::Silent, ..problem }).await);
                    }
                },
                () = self.prefill.ended() => {}
                problem = silent(&self.pair.decode.client) => return Err(self.decode_failed(problem).await),
            }
        }
    }

    fn hold(&mut self, event: PairEvent) {
        self.held = Some((event, Instant::now() + REPLY));
    }

    /// What was held, with what prefill says.
    fn complete(&mut self) -> Result<PairEvent, Problem> {
        match (self.held.take(), &self.prefill) {
            (Some((PairEvent::Token(token), _)), Prefill::Replied(reply)) => {
                Ok(PairEvent::Token(Chosen { top: reply.first.top.clone(), ..token }))
            }
            (Some((PairEvent::Done(done), _)), Prefill::Replied(reply)) => {
                Ok(PairEvent::Done(PairDone { prefill: Some(reply.clone()), ..done }))
            }
            (Some((done @ PairEvent::Done(_), _)), _) => Ok(done),
            (_, Prefill::Failed(problem)) => Err(self.of_prefill(problem)),
            (_, _) => {
                let cause = "the first token is there, but its alternatives do not come";
                let problem = Problem::new(Blame::PeerMisbehaved, Stage::HandOff, cause);
                Err(problem.at(&self.pair.prefill.instance))
            }
        }
    }

    /// What prefill says, as this side tells it.
    fn of_prefill(&self, problem: &Problem) -> Problem {
        told(problem.clone(), Stage::HandOff, &self.pair.prefill, &self.pair.decode)
    }

    /// The more telling of decode's failure and what prefill says within a moment.
    async fn decode_failed(&mut self, problem: Problem) -> Problem {
        let stage = if self.begun { Stage::Compute } else { Stage::HandOff };
        let ours = told(problem, stage, &self.pair.decode, &self.pair.prefill);
        if self.begun || weight(&ours) == OWN {
            return ours;
        }
        if self.prefill.is_asked() {
            let _ = timeout(LAST_WORDS, self.prefill.ended()).await;
        }
        match &self.prefill {
            Prefill::Failed(theirs) => {
                let theirs = self.of_prefill(theirs);
                if weight(&theirs) > weight(&ours) { theirs } else { ours }
            }
            _ => ours,
        }
    }

    /// The more telling of prefill's failure and what decode says within a moment; none when decode has no failure but a
    /// token.
    async fn prefill_failed(&mut self, ours: Problem) -> Option<Problem> {
        if weight(&ours) == OWN {
            return Some(ours);
        }
        let theirs = match timeout(LAST_WORDS, self.decode_says()).await {
            // It may have everything all the same.
            Ok(Ok(Some(DecodeRecord::Token(_) | DecodeRecord::Done(_)))) => return None,
            Ok(Ok(Some(DecodeRecord::Error(problem)))) | Ok(Err(problem)) => problem,
            Ok(Ok(_)) | Err(_) => return Some(ours),
        };
        let theirs = told(theirs, Stage::HandOff, &self.pair.decode, &self.pair.prefill);
        Some(if weight(&theirs) >= weight(&ours) { theirs } else { ours })
    }

    /// What comes after `reserved`; it stays to be read.
    async fn decode_says(&mut self) -> Result<Option<DecodeRecord>, Problem> {
        loop {
            match self.decode.peek().await?.cloned() {
                Some(DecodeRecord::Reserved { .. }) => drop(self.decode.next().await?),
                said => return Ok(said),
            }
        }
    }
}

/// [`weight`] of what an instance found in its own work: nothing explains it better.
const OWN: u8 = 3;

/// How much a problem explains.
fn weight(problem: &Problem) -> u8 {
    match (problem.reach, problem.stage, problem.blame) {
        // "The other side gave the room up."
        (Reach::Answered, Stage::HandOff, Blame::Caller) => 0,
        (Reach::Silent | Reach::Refused, ..) => 1,
        (Reach::Answered, Stage::HandOff, _) => 2,
        (Reach::Answered, ..) => OWN,
    }
}

/// A problem that `by` tells, with the instance where it happened: the `other` one when `by` has lost it. `stage` is what
/// `by` was doing, if it cannot say so itself.
fn told(problem: Problem, stage: Stage, by: &Leg, other: &Leg) -> Problem {
    let stage = if problem.reach == Reach::Silent { stage } else { problem.stage };
    let place = if problem.peer_lost { other } else { by };
    Problem { stage, ..problem }.at(&place.instance)
}

/// Comes true when an instance does not answer any more: its process may be stopped, which no connection shows.
async fn silent(client: &InstanceClient) -> Problem {
    loop {
        sleep(SILENCE).await;
        match timeout(ALIVE, client.health()).await {
            Ok(Ok(_)) => {}
            Ok(Err(problem)) => return Problem { reach: Reach::Silent, ..problem },
            Err(_) => {
                let cause = format!(
                    "it does not answer within {} s; its process may be stopped, or the machine overloaded",
                    ALIVE.as_secs()
                );
                let problem = Problem::new(Blame::PeerMisbehaved, Stage::Lookup, cause);
                return Problem { reach: Reach::Silent, ..problem };
            }
        }
    }
}

#[cfg(test)]
mod tests;
