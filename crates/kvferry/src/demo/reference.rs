//! The same prompts in this process alone: what the two processes are compared with. Nothing here plans or moves:
//! pages are filled by the forward pass, or copied coordinate by coordinate.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvferry_engine::{
    DecodeBatch, Engine, EngineConfig, Event, Events, FirstToken, Model, NoHandOff, Request,
};
use kvferry_plan::{Attempt, Blame, Cast, LayoutSpec, RankId, RoomId, RoomKey};
use kvferry_server::{Chosen, KvDump};

use super::{
    conversion::{self, Unconverted},
    prompts::Prompt,
    report::Claim,
    tolerance,
};
use crate::{
    args::{DemoArgs, InjectArg},
    failure::Failure,
};

const KEY: RoomKey = RoomKey { room: RoomId(1), attempt: Attempt(0) };

/// An answer and the cache it was made from.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) tokens: Vec<Chosen>,
    pub(super) first: Duration,
    pub(super) last: Duration,
    /// The prompt's cache, all ranks.
    pub(super) cache: Vec<KvDump>,
    /// What there was before a conversion, where there is one.
    pub(super) unconverted: Option<Unconverted>,
}

/// How the reference is run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) claim: Claim,
    max_tokens: u32,
    ignore_eos: bool,
    /// Computes the prompt; also continues it unless there is a `decode`.
    whole: EngineConfig,
    /// Continues the prompt.
    decode: Option<EngineConfig>,
    /// What becomes of rows in between.
    pub(super) cast: Option<Cast>,
    /// A fault of decode's arithmetic that was asked for, which answers have to show.
    pub(super) fault: Option<InjectArg>,
    /// Whether to answer in the source's element type too, to see what the conversion costs.
    also_unconverted: bool,
}

impl Plan {
    /// One rank that does all; or, where bits depend on the layout and are rounded (fast arithmetic on a narrow
    /// cache), the prefill layout for the prompt and the decode layout for the answer. Where the element types of the two
    /// sides differ, a rank with that of prefill for the prompt and one with that of decode for the answer.
    pub(super) fn new(args: &DemoArgs) -> Self {
        let claim = tolerance(args);
        let (from, to) = args.dtypes();
        let cast = Cast::between(from, to);
        let single = |kv| LayoutSpec { kv: Some(kv), ..LayoutSpec::default() };
        let (whole, decode) = match (claim, cast) {
            (Claim::CloseFromSamePrefill, _) => (args.prefill.clone(), Some(args.decode.clone())),
            (_, Some(_)) => (single(from), Some(single(to))),
            (_, None) => (LayoutSpec { kv: args.decode.kv, ..LayoutSpec::default() }, None),
        };
        // A reference computes everything itself, in the plainest form.
        let config = |layout| EngineConfig {
            prefix_cache: false,
            decode_batch: DecodeBatch::Eager,
            ..args.engine.config(layout)
        };
        Self {
            claim,
            max_tokens: args.max_tokens,
            ignore_eos: args.ignore_eos,
            whole: config(&whole),
            decode: decode.as_ref().map(config),
            cast,
            fault: args.engine.inject.filter(|fault| fault.in_arithmetic().is_some()),
            also_unconverted: args.suite.is_none() && cast.is_some_and(|cast| !cast.exact()),
        }
    }

    /// The same where the reference may go on from what an earlier prompt of it left, as what it is compared with does.
    pub(super) fn with_prefix_cache(mut self) -> Self {
        for engine in [&mut self.whole].into_iter().chain(&mut self.decode) {
            engine.prefix_cache = true;
        }
        self
    }

    /// What the reference is, in words.
    pub(super) fn reference(&self) -> String {
        let Some(decode) = &self.decode else { return format!("one process, {}", self.whole.layout) };
        let how = match (self.claim, self.cast) {
            (Claim::CloseFromSamePrefill, _) => format!(
                " (how {} is rounded depends on the prefill layout)",
                self.whole.layout.kv.unwrap_or(self.whole.kv)
            ),
            _ => String::new(),
        };
        let cast = self.cast.map(|cast| format!(" and cast from {cast}")).unwrap_or_default();
        format!(
            "one process: the prompt as {}{how}, copied coordinate by coordinate{cast}, continued as {}",
            self.whole.layout, decode.layout
        )
    }

    /// Builds the pools.
    pub(super) fn start(&self, model: &Arc<Model>) -> Result<Reference, Failure> {
        let start = |config: &EngineConfig| Engine::start(Arc::clone(model), config, Arc::new(NoHandOff));
        let whole = start(&self.whole)?;
        let decode = self.decode.as_ref().map(start).transpose()?;
        Ok(Reference { plan: self.clone(), whole, decode })
    }
}

/// The engines of the reference.
pub(super) struct Reference {
    plan: Plan,
    whole: Engine,
    decode: Option<Engine>,
}

impl Reference {
    /// Answers one prompt.
    pub(super) fn run(&self, prompt: &Prompt, on_token: impl FnMut(u32)) -> Result<Answer, Failure> {
        let request = Request {
            ignore_eos: self.plan.ignore_eos,
            hold: Some(KEY),
            ..Request::greedy(prompt.ids.clone(), self.plan.max_tokens)
        };
        let also = match self.plan.also_unconverted {
            true => {
                let alone = self.alone(request.clone(), |_| ());
                self.whole.release(KEY);
                Some(alone?.tokens)
            }
            false => None,
        };
        let answer = match &self.decode {
            None => self.alone(request, on_token),
            Some(decode) => self.in_two(decode, request, on_token),
        };
        self.whole.release(KEY);
        let mut answer = answer?;
        if let Some(unconverted) = &mut answer.unconverted {
            unconverted.tokens = also;
        }
        Ok(answer)
    }

    fn alone(&self, request: Request, on_token: impl FnMut(u32)) -> Result<Answer, Failure> {
        let started = Instant::now();
        let (tokens, first) = collect(self.whole.generate(request)?, started, on_token)?;
        let last = started.elapsed();
        Ok(Answer { tokens, first, last, cache: cache(&self.whole)?, unconverted: None })
    }

    fn in_two(
        &self,
        decode: &Engine,
        request: Request,
        on_token: impl FnMut(u32),
    ) -> Result<Answer, Failure> {
        let started = Instant::now();
        let prompt_only = Request { max_tokens: 1, ..request.clone() };
        let (tokens, _) = collect(self.whole.generate(prompt_only)?, started, |_| ())?;
        let first = tokens
            .first()
            .map(|t| FirstToken { id: t.id, logprob: t.logprob, top: Vec::new() })
            .ok_or_else(no_token)?;
        let rows = self.whole.rows(KEY)?.wait()?;
        let lease = decode.reserve(KEY, request)?.wait()?;
        let unconverted = match self.plan.cast {
            Some(_) => {
                decode.adopt_converted(&lease, &rows, &conversion::convert)?;
                Some(Unconverted { cache: cache(&self.whole)?, tokens: None })
            }
            None => {
                decode.adopt(&lease, &rows)?;
                None
            }
        };
        let (tokens, first) = collect(decode.decode(&lease, first)?, started, on_token)?;
        let last = started.elapsed();
        Ok(Answer { tokens, first, last, cache: cache(decode)?, unconverted })
    }
}

fn collect(
    mut events: Events,
    started: Instant,
    mut on_token: impl FnMut(u32),
) -> Result<(Vec<Chosen>, Duration), Failure> {
    let (mut tokens, mut first) = (Vec::new(), None);
    while let Some(event) = events.recv() {
        match event {
            Event::Token { id, logprob, top } => {
                first.get_or_insert_with(|| started.elapsed());
                on_token(id);
                tokens.push(Chosen { id, logprob, top });
            }
            Event::Done { .. } => return first.map(|first| (tokens, first)).ok_or_else(no_token),
            Event::Failed(error) => return Err(Failure::from(error).within("the reference run")),
            _ => {}
        }
    }
    Err(Failure::new(Blame::Us, "the reference run ended without an end"))
}

fn no_token() -> Failure {
    Failure::new(Blame::Us, "the reference run gave no token")
}

fn cache(engine: &Engine) -> Result<Vec<KvDump>, Failure> {
    let rows = engine.rows(KEY)?.wait()?;
    (0..engine.placement().ranks()).map(|rank| Ok(KvDump::new(KEY, rows.rank(RankId(rank))?))).collect()
}
