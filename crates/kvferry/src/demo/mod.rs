//! `kvferry demo`: the same prompts across two processes and in one, and whether they are equal.

mod cluster;
mod compare;
mod conversion;
mod disaggregated;
mod kimi;
mod matrix;
mod prompts;
mod reference;
mod report;
mod shard;
mod show;
mod suite;
mod table;

use std::{process::ExitCode, slice, sync::Arc};

use kvferry_engine::{
    Model,
    checkpoint::{Checkpoint, ModelConfig},
    math::Arith,
};
use kvferry_plan::Dtype;

use crate::{
    args::{AttentionArg, DemoArgs, SuiteArg},
    failure::Failure,
    model::{self, Located, Progress},
    serve::blocking,
    terminal,
    transports::caution,
};
use cluster::{Cluster, Over};
use prompts::Prompt;
use reference::{Answer, Plan};
use report::{Finding, ModelInfo, Outcome, PromptReport, Report};
use show::Show;

/// Runs the demo; the exit status says whether everything was proven equal.
pub(crate) async fn run(mut args: DemoArgs) -> Result<ExitCode, Failure> {
    caution(args.sides.of(&args.engine.transport, (1, 1))?.iter().flatten());
    match args.suite {
        Some(SuiteArg::Matrix) => return matrix::run(args).await,
        Some(SuiteArg::KimiDcp) => return kimi::run(args).await,
        Some(SuiteArg::KvShard) => return shard::run(args).await,
        None => {}
    }
    args.engine.same_cache(slice::from_ref(&args.prefill), slice::from_ref(&args.decode))?;
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let located = model::or_embedded(args.model.as_ref(), progress).await?;
    let checkpoint = blocking({
        let located = located.clone();
        move || located.open()
    })
    .await?;
    let prompts = prompts::collect(&args, &checkpoint)?;
    let tokenizer = checkpoint.tokenizer()?;
    args.engine.pool_tokens = Some(pool_tokens(&args, &prompts, longest_sequence(&args, &checkpoint))?);
    let options = args.engine.load_options();

    // Three processes read the model at the same time; nothing is timed before all of them are ready.
    let show = Show::new(progress, tokenizer);
    let attention = form(checkpoint.config(), args.engine.attention);
    show.title(&named(&located, checkpoint.name()), attention, &args);
    let starting = progress.spinner("starting the processes; each loads the model");
    let load = blocking(move || Ok(Model::from_checkpoint(&checkpoint, options)?));
    let (cluster, model) = tokio::try_join!(Cluster::start(&args, &located), load)?;
    starting.finish_and_clear();
    show.cluster(&cluster);

    // One after the other, so that each has the whole machine.
    let mut handed = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        show.prompt(prompt);
        let mut text = show.answer("two processes");
        let run =
            disaggregated::run((&cluster.prefill, &cluster.decode), prompt, &args, |id| text.push(id)).await;
        text.end();
        handed.push(run);
    }
    let announced = cluster.over.clone();
    cluster.stop().await;

    let plan = Plan::new(&args);
    let needed: Vec<Option<Prompt>> =
        prompts.iter().zip(&handed).map(|(prompt, run)| run.is_ok().then(|| prompt.clone())).collect();
    let answers = {
        let (model, plan, show) = (Arc::clone(&model), plan.clone(), show.clone());
        blocking(move || reference_runs(&model, &plan, needed, &show)).await?
    };

    // The last prompt's: a link that does not come about is not tried again soon.
    let over = handed.iter().rev().find_map(|run| run.as_ref().ok()).map(|run| {
        let transfer = &run.decode.transfer;
        Over { transport: transfer.transport.clone(), why: transfer.transport_why.clone() }
    });
    if let Some(over) = over.as_ref().filter(|over| announced.as_ref() != Some(*over)) {
        show.moved_over(over);
    }
    let mut reports = Vec::with_capacity(prompts.len());
    for ((prompt, run), answer) in prompts.iter().zip(handed).zip(answers) {
        let outcome = match (run, answer) {
            (Ok(run), Some(answer)) => Outcome::compare(&plan, &run, &answer),
            (Err(problem), _) => Outcome::failed(Finding::hand_off(&problem)),
            (Ok(_), None) => Outcome::failed(Finding::no_reference()),
        };
        reports.push(PromptReport::new(prompt, outcome));
    }
    let model = ModelInfo { name: model.name().to_owned(), sha256: model.sha256().to_owned() };
    let report = Report::new(model, attention, &args, plan.reference(), over, reports);
    if args.json {
        terminal::line(serde_json::to_string(&report).map_err(|e| Failure::new(kvferry_plan::Blame::Us, e))?);
    } else {
        table::print(&report);
    }
    Ok(match report.proven {
        true => ExitCode::SUCCESS,
        false if report.missed() => ExitCode::from(2),
        false => ExitCode::FAILURE,
    })
}

/// The name that a command line and an API know the model by, and that of its file where it is another.
fn named(located: &Located, file: &str) -> String {
    located.served_name().map_or_else(|| file.to_owned(), |name| format!("{name} ({file})"))
}

/// The form of attention that a model runs in: one that has latent rows or state, in its own.
fn form(config: &ModelConfig, asked: AttentionArg) -> &'static str {
    match (&config.kda, &config.mla, asked) {
        (Some(_), ..) => "hybrid",
        (None, Some(_), _) | (None, None, AttentionArg::Mla) => "mla",
        (None, None, AttentionArg::Gqa) => "gqa",
    }
}

fn reference_runs(
    model: &Arc<Model>,
    plan: &Plan,
    prompts: Vec<Option<Prompt>>,
    show: &Show,
) -> Result<Vec<Option<Answer>>, Failure> {
    if prompts.iter().all(Option::is_none) {
        return Ok(prompts.iter().map(|_| None).collect());
    }
    let reference = plan.start(model)?;
    let several = prompts.len() > 1;
    prompts
        .into_iter()
        .map(|prompt| {
            let Some(prompt) = prompt else { return Ok(None) };
            if several {
                show.prompt(&prompt);
            }
            let mut text = show.answer("one process");
            let answer = reference.run(&prompt, |id| text.push(id));
            text.end();
            answer.map(Some)
        })
        .collect()
}

/// Whether a request runs on f32 sums whose order depends on the layout, and what that means for comparisons.
fn tolerance(args: &DemoArgs) -> report::Claim {
    let (from, to) = args.dtypes();
    match (args.engine.arith.into(), from, to) {
        (Arith::Canonical, ..) => report::Claim::Bits,
        (_, Dtype::F32, Dtype::F32) => report::Claim::Close,
        _ => report::Claim::CloseFromSamePrefill,
    }
}

/// Tokens of each pool: enough for the longest sequence, because sequences come one after the other, and for its prompt to be
/// let in at prefill; never more.
fn pool_tokens(args: &DemoArgs, prompts: &[Prompt], sequence: u64) -> Result<u64, Failure> {
    let longest = prompts.iter().map(|p| p.ids.len() as u64).max().unwrap_or(0);
    let held = longest.saturating_add(u64::from(args.max_tokens)).min(sequence);
    let let_in = args.prefill.pool_for_prompt(longest);
    let needed = held.max(let_in);
    match args.engine.pool_tokens {
        None => Ok(needed),
        Some(tokens) if tokens >= needed => Ok(tokens.min(sequence.max(needed))),
        Some(tokens) if held >= let_in => Err(Failure::caller(format!(
            "--pool-tokens {tokens}: the longest prompt has {longest} tokens and up to {} are generated; give at least \
             {needed}, leave the flag out, or lower --max-tokens",
            held.saturating_sub(longest)
        ))),
        Some(tokens) => Err(Failure::caller(format!(
            "--pool-tokens {tokens}: the longest prompt has {longest} tokens, and prefill keeps room beside it; give at \
             least {needed}, or leave the flag out"
        ))),
    }
}

/// The model's longest sequence, or what the command line allows of it.
fn longest_sequence(args: &DemoArgs, checkpoint: &Checkpoint) -> u64 {
    checkpoint.config().longest(args.engine.max_model_len).into()
}
