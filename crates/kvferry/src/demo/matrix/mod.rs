//! `kvferry demo --suite matrix`: every layout of a list hands prompts to every other, and so do some that only prefill can
//! have. Each layout runs once on each side, in its own process, for each model, form of attention and element type; what
//! decode holds and answers is compared with one process that has one rank. A short list of further pairs have another element type on each side, and
//! prefill converts.

mod layouts;
mod report;

use std::{process::ExitCode, sync::Arc};

use futures_util::{StreamExt, stream};
use indicatif::ProgressBar;
use kvferry_engine::Model;
use kvferry_plan::{Blame, Cast, Dtype, LayoutSpec};

use super::{
    cluster::{Fleet, Handle, Side},
    conversion::Conversion,
    disaggregated, form,
    prompts::{self, Prompt},
    reference::{Answer, Plan},
    report::{CacheReport, Finding, Outcome},
};
use crate::{
    args::{ArithArg, AttentionArg, DemoArgs},
    failure::Failure,
    model::{self, Located, Progress},
    serve::blocking,
    terminal,
};
use report::{Cell, Converted, Due, Matrix, Sheet};

/// Prompts of each cell, in tokens: one that leaves ranks without a row, and one that is longer than the virtual page of
/// every listed layout.
const PROMPTS: [usize; 2] = [5, 401];
/// Tokens of each answer.
const ANSWER: u32 = 3;
/// Cells at a time: their transfers and comparisons overlap with the computation of others.
const AT_ONCE: usize = 4;
/// Prompt tokens in a step: the long prompt is handed over in pieces that end on nobody's page.
const CHUNK: u32 = 150;

/// What is run when no model is named.
const BUILT_IN: [&str; 2] = ["embedded:llama_tiny", "embedded:needle_kimi"];

/// Runs the matrix; the exit status says whether every cell was proven equal.
pub(crate) async fn run(mut args: DemoArgs) -> Result<ExitCode, Failure> {
    let tokens = PROMPTS.iter().map(|tokens| tokens + ANSWER as usize).sum::<usize>();
    args.engine.arith = ArithArg::Canonical;
    args.engine.chunk = CHUNK;
    // For as many rooms as one instance can have when all cells that run meet there.
    args.engine.pool_tokens = Some((tokens * AT_ONCE) as u64);
    args.engine.no_prefix_cache = true;
    (args.max_tokens, args.ignore_eos) = (ANSWER, true);
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let subjects = subjects(&args, progress).await?;
    let (both, prefill_only) = (layouts::names(args.quick), layouts::prefill_only(args.quick));
    let types = [Dtype::F32, Dtype::Bf16, Dtype::Fp8E4m3];
    let sheets = subjects.len() * types.len();
    let conversions = subjects.iter().map(|subject| subject.conversions().count()).sum();
    let cells = subjects.iter().map(|subject| subject.pairs() * types.len()).sum();
    let mut matrix = Matrix::new(&args, [&both, &prefill_only], &PROMPTS, Due { cells, conversions });
    if !args.json {
        matrix.title(sheets);
    }
    let bar = progress.things("cells", (cells + conversions) as u64);
    for subject in &subjects {
        for kv in types {
            matrix.sheets.push(subject.sheet(&args, kv, &bar).await?);
        }
        matrix.conversions.extend(subject.converted(&args, &bar).await?);
    }
    bar.finish_and_clear();
    if args.json {
        terminal::line(serde_json::to_string(&matrix.finished()).map_err(|e| Failure::new(Blame::Us, e))?);
    } else {
        matrix.print();
    }
    Ok(if matrix.proven() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every model that is asked for, in every form that it can run in.
async fn subjects(args: &DemoArgs, progress: Progress) -> Result<Vec<Subject>, Failure> {
    let models = match &args.model {
        Some(model) => vec![model.clone()],
        None => {
            BUILT_IN.iter().map(|name| name.parse().map_err(Failure::caller)).collect::<Result<_, _>>()?
        }
    };
    let mut subjects = Vec::new();
    for model in models {
        let located = model::locate(&model, progress).await?;
        let checkpoint = blocking({
            let located = located.clone();
            move || located.open()
        })
        .await?;
        let config = checkpoint.config();
        // A model with latent rows runs as it is.
        let as_it_is = config.kda.is_some() || config.mla.is_some();
        let forms = if as_it_is { &[AttentionArg::Gqa][..] } else { &[AttentionArg::Gqa, AttentionArg::Mla] };
        for attention in forms {
            let latent = as_it_is || *attention == AttentionArg::Mla;
            let decodes = named(layouts::names(args.quick), config.layers)?;
            let only = named(layouts::prefill_only(args.quick), config.layers)?;
            // Ranks of TP hold the same rows only where these are latent.
            let can = |spec: &LayoutSpec| latent || spec.cp > 1 || !spec.shard;
            let prefills = decodes.iter().cloned().chain(only).map(|spec| can(&spec).then_some(spec));
            subjects.push(Subject {
                model: checkpoint.name().to_owned(),
                located: located.clone(),
                attention: *attention,
                form: form(config, *attention),
                prefills: prefills.collect(),
                decodes,
                converted: {
                    let [prefill, decode] = layouts::converted(args.quick);
                    [named(prefill, config.layers)?, named(decode, config.layers)?]
                },
                prompts: PROMPTS.map(|count| prompts::by_ids(config.vocab, count)).into(),
            });
        }
    }
    Ok(subjects)
}

fn named(names: Vec<&str>, layers: usize) -> Result<Vec<LayoutSpec>, Failure> {
    names.into_iter().map(|name| layouts::named(name, layers)).collect()
}

/// A model in one form of attention.
struct Subject {
    model: String,
    located: Located,
    attention: AttentionArg,
    form: &'static str,
    /// Every one that is listed, in this order; none where this model cannot have it.
    prefills: Vec<Option<LayoutSpec>>,
    decodes: Vec<LayoutSpec>,
    /// Those at prefill and those at decode that are paired with a conversion.
    converted: [Vec<LayoutSpec>; 2],
    prompts: Vec<Prompt>,
}

impl Subject {
    /// Number of pairs of layouts.
    fn pairs(&self) -> usize {
        self.prefills.iter().flatten().count() * self.decodes.len()
    }

    /// All pairs of layouts with one element type.
    async fn sheet(&self, args: &DemoArgs, kv: Dtype, bar: &ProgressBar) -> Result<Sheet, Failure> {
        let mut args = args.clone();
        (args.engine.attention, args.engine.kv_dtype) = (self.attention, kv);
        let plan = Plan::new(&args);
        let answers = self.answers(&args, plan.clone()).await?;
        let mut fleet = Fleet::start().await?;
        let (numbers, prefills): (Vec<usize>, Vec<LayoutSpec>) =
            self.prefills.iter().enumerate().filter_map(|(n, spec)| Some((n, spec.clone()?))).unzip();
        let side = |role, layouts| Side { role, layouts, engine: &args.engine };
        let sides = [side("prefill", prefills.as_slice()), side("decode", &self.decodes)];
        let [prefill, decode] = fleet.join(sides, &self.located).await?;
        let prefill: Vec<_> = numbers.into_iter().zip(&prefill).collect();
        // Neighbours in this order have no instance in common.
        let count = decode.len();
        let pairs = (0..count).flat_map(|shift| {
            prefill.iter().enumerate().map(move |(at, prefill)| (*prefill, (at + shift) % count))
        });
        let pairs = pairs.filter_map(|(from, to)| Some((from, (to, decode.get(to)?))));
        let mut cells = stream::iter(pairs)
            .map(|((from, prefill), (to, decode))| {
                let cell = self.cell((prefill, decode), &args, (&plan, &answers));
                async move {
                    let (findings, state) = cell.await;
                    (Cell { prefill: from, decode: to, findings }, state)
                }
            })
            .buffer_unordered(AT_ONCE);
        let mut sheet = Sheet::new(&self.model, self.form, kv);
        while let Some((cell, state)) = cells.next().await {
            sheet.push(cell, state);
            bar.inc(1);
        }
        drop(cells);
        fleet.stop().await;
        Ok(sheet)
    }

    /// The pairs with a conversion, by number on either side.
    fn conversions(&self) -> impl Iterator<Item = (usize, usize, Cast)> + '_ {
        let [prefill, decode] = &self.converted;
        prefill.iter().enumerate().flat_map(move |(a, from)| {
            decode
                .iter()
                .enumerate()
                .filter_map(move |(b, to)| Some((a, b, Cast::between(from.kv?, to.kv?)?)))
        })
    }

    /// Runs them, each against a reference of its own.
    async fn converted(&self, args: &DemoArgs, bar: &ProgressBar) -> Result<Vec<Converted>, Failure> {
        let mut args = args.clone();
        (args.engine.attention, args.engine.convert_kv) = (self.attention, true);
        let mut fleet = Fleet::start().await?;
        let [sources, targets] = &self.converted;
        let side = |role, layouts| Side { role, layouts, engine: &args.engine };
        let sides = [side("prefill", sources.as_slice()), side("decode", targets)];
        let [prefill, decode] = fleet.join(sides, &self.located).await?;
        let mut all = Vec::new();
        for (from, to, cast) in self.conversions() {
            let pair = prefill.get(from).zip(decode.get(to)).zip(sources.get(from).zip(targets.get(to)));
            let Some((pair, (source, target))) = pair else { continue };
            (args.prefill, args.decode) = (source.clone(), target.clone());
            let plan = Plan::new(&args);
            let answers = self.answers(&args, plan.clone()).await?;
            let outcomes = self.outcomes(pair, &args, (&plan, &answers)).await;
            all.push(Converted {
                model: self.model.clone(),
                attention: self.form,
                cast,
                prefill: source.to_string(),
                decode: target.to_string(),
                conversion: Conversion::all(outcomes.iter()),
                findings: outcomes.into_iter().flat_map(|outcome| outcome.findings).collect(),
            });
            bar.inc(1);
        }
        fleet.stop().await;
        Ok(all)
    }

    /// What one process says to the prompts.
    async fn answers(&self, args: &DemoArgs, plan: Plan) -> Result<Vec<Answer>, Failure> {
        let options = args.engine.load_options();
        let (located, prompts) = (self.located.clone(), self.prompts.clone());
        blocking(move || {
            let model: Arc<Model> = Model::from_checkpoint(&located.open()?, options)?;
            let reference = plan.start(&model)?;
            prompts.iter().map(|prompt| reference.run(prompt, |_| ())).collect()
        })
        .await
    }

    /// Hands all prompts from one instance to another, one after the other; what was found, and the state that was
    /// compared.
    async fn cell(
        &self,
        pair: (&Handle, &Handle),
        args: &DemoArgs,
        right: (&Plan, &[Answer]),
    ) -> (Vec<Finding>, Option<CacheReport>) {
        let outcomes = self.outcomes(pair, args, right).await;
        let state = CacheReport::sum(outcomes.iter().map(|outcome| outcome.state));
        (outcomes.into_iter().flat_map(|outcome| outcome.findings).collect(), state)
    }

    async fn outcomes(
        &self,
        pair: (&Handle, &Handle),
        args: &DemoArgs,
        (plan, answers): (&Plan, &[Answer]),
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for (prompt, answer) in self.prompts.iter().zip(answers) {
            outcomes.push(match disaggregated::run(pair, prompt, args, |_| ()).await {
                Ok(run) => Outcome::compare(plan, &run, answer),
                Err(problem) => Outcome::failed(Finding::hand_off(&problem)),
            });
        }
        outcomes
    }
}
