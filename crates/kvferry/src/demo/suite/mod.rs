//! What suites of cases have in common: prompts and what is right of them, one process to compare with, hand-offs, and
//! what came of a case. Not for which cases there are (`kimi`, `shard`).

pub(super) mod needles;
pub(super) mod report;

use std::{
    collections::{HashMap, hash_map::Entry},
    process::ExitCode,
    sync::Arc,
};

use futures_util::future::join_all;
use kvferry_engine::Model;
use kvferry_plan::{Blame, LayoutSpec};
use serde::Serialize;

use super::{
    cluster::Handle,
    disaggregated,
    prompts::Prompt,
    reference::{Answer, Plan},
    report::{Finding, Outcome},
};
use crate::{args::DemoArgs, failure::Failure, model::Located, serve::blocking, terminal};

/// A prompt, and what is right.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) prompt: Prompt,
    /// It is what one process answers, and also begins so where that is known.
    pub(super) answer: Option<Vec<u32>>,
    /// Tokens that prefill has from earlier prompts and does not compute; `None` where that depends on who came first.
    pub(super) cached: Option<u64>,
}

impl Asked {
    /// A prompt of which nothing is there yet and no answer is known.
    pub(super) fn new(prompt: Prompt) -> Self {
        Self { prompt, answer: None, cached: Some(0) }
    }
}

/// Refuses a model, where a suite's cases are about its own.
pub(super) fn own_models(args: &DemoArgs) -> Result<(), Failure> {
    match &args.model {
        None => Ok(()),
        Some(model) => Err(Failure::caller(format!(
            "--model {model}: the cases of this suite are about its own models; leave it out, or use --suite matrix"
        ))),
    }
}

/// Says what came of a suite, for people or for programs; the exit status is whether it is `proven`.
pub(super) fn conclude<S: Serialize>(
    args: &DemoArgs,
    suite: &S,
    proven: bool,
    verdict: impl FnOnce(&S),
) -> Result<ExitCode, Failure> {
    if args.json {
        terminal::line(serde_json::to_string(suite).map_err(|e| Failure::new(Blame::Us, e))?);
    } else {
        verdict(suite);
    }
    Ok(if proven { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A layout that a suite names.
pub(super) fn layout(text: &str) -> Result<LayoutSpec, Failure> {
    text.parse().map_err(|e: kvferry_plan::SpecError| Failure::new(Blame::Us, e))
}

/// What one process answers, by the ids of the prompt.
pub(super) struct Answers(HashMap<Vec<u32>, Answer>);

impl Answers {
    /// Asks it all `prompts`, in this order.
    pub(super) async fn of(
        prompts: Vec<Prompt>,
        model: &Located,
        args: &DemoArgs,
        plan: &Plan,
    ) -> Result<Self, Failure> {
        let (options, plan, model) = (args.engine.load_options(), plan.clone(), model.clone());
        blocking(move || {
            let model: Arc<Model> = Model::from_checkpoint(&model.open()?, options)?;
            let reference = plan.start(&model)?;
            let mut answers = HashMap::new();
            for prompt in prompts {
                if let Entry::Vacant(vacant) = answers.entry(prompt.ids.clone()) {
                    vacant.insert(reference.run(&prompt, |_| ())?);
                }
            }
            Ok(Self(answers))
        })
        .await
    }
}

/// Hands prompts over and compares what comes with what is right.
#[derive(Clone, Copy)]
pub(super) struct Judge<'a> {
    pub(super) args: &'a DemoArgs,
    pub(super) plan: &'a Plan,
    pub(super) answers: &'a Answers,
}

impl Judge<'_> {
    /// Hands one prompt from a prefill to a decode instance; `on_token` is called for each token of the answer.
    pub(super) async fn hand_over(
        self,
        asked: &Asked,
        pair: (&Handle, &Handle),
        mut on_token: impl FnMut(),
    ) -> Outcome {
        let run = match disaggregated::run(pair, &asked.prompt, self.args, |_| on_token()).await {
            Ok(run) => run,
            Err(problem) => return Outcome::failed(Finding::hand_off(&problem)),
        };
        let Some(answer) = self.answers.0.get(&asked.prompt.ids) else {
            return Outcome::failed(Finding::no_reference());
        };
        let outcome = Outcome::compare(self.plan, &run, answer);
        let outcome = match asked.cached {
            Some(cached) => outcome.cached(cached),
            None => outcome,
        };
        match &asked.answer {
            Some(known) => outcome.knowing(known),
            None => outcome,
        }
    }

    /// One after the other.
    pub(super) async fn in_turn(self, all: &[Asked], pair: (&Handle, &Handle)) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(all.len());
        for asked in all {
            outcomes.push(self.hand_over(asked, pair, || ()).await);
        }
        outcomes
    }

    /// All at the same time.
    pub(super) async fn at_once(self, all: &[Asked], pair: (&Handle, &Handle)) -> Vec<Outcome> {
        join_all(all.iter().map(|asked| self.hand_over(asked, pair, || ()))).await
    }
}
