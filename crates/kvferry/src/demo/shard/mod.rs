//! `kvferry demo --suite kv-shard`: prefill whose ranks keep only their own pages, to every kind of decode. Prompts at
//! every edge, with known answers, under pressure and at the limits of pools; then deliberate faults, which have to be found.
//! What decode holds and answers is compared with one process that has one rank and deals nothing.

mod cases;
mod passkeys;
mod report;

use std::{process::ExitCode, time::Duration};

use indicatif::ProgressBar;
use kvferry_plan::Blame;
use tokio::time::{Instant, sleep};

use super::{
    cluster::{Fleet, Handle, Side},
    disaggregated, form,
    reference::Plan,
    report::{Finding, Outcome},
    suite::{
        Answers, Judge, conclude, layout, own_models,
        report::{CaseReport, Refused},
    },
};
use crate::{
    args::{DemoArgs, EngineArgs},
    failure::Failure,
    model::{self, Located, ModelRef, Progress},
    serve::blocking,
};
use cases::{Case, How, Past, Section, Subject};
use report::{PairReport, Suite};

/// Tokens that a pool has beside the requests of its cases: pages that prefill keeps back, on each of four ranks.
const BESIDE: u64 = 512;
/// For pages to be given back once a request is over.
const SETTLE: Duration = Duration::from_secs(5);

/// Runs the suite; the exit status says whether every case was as it has to be.
pub(crate) async fn run(args: DemoArgs) -> Result<ExitCode, Failure> {
    own_models(&args)?;
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let smollm2 = match args.quick {
        true => None,
        false => Some(model::locate(&ModelRef::SmolLm2, progress).await?),
    };
    let tokenizer = match smollm2.clone() {
        Some(located) => blocking(move || Ok(located.open()?.tokenizer()?)).await?,
        None => None,
    };
    let sections = cases::all(tokenizer.as_ref())?;
    let mut suite = Suite::new(&args);
    if !args.json {
        suite.title();
    }
    let count = sections.iter().map(|section| section.cases().count()).sum::<usize>();
    let bar = progress.things("cases", count as u64);
    for section in &sections {
        let located = match (section.model, &smollm2) {
            (Subject::Embedded(embedded), _) => Located::Embedded(embedded),
            (Subject::SmolLm2, Some(located)) => located.clone(),
            (Subject::SmolLm2, None) => return Err(Failure::new(Blame::Us, "a section lacks its model")),
        };
        let attention = {
            let (located, asked) = (located.clone(), section.attention);
            blocking(move || Ok(form(located.open()?.config(), asked))).await?
        };
        let found = run_section(section, &located, &args, &bar).await?;
        suite.push(section, attention, found);
        if !args.json {
            bar.suspend(|| suite.print_last());
        }
    }
    bar.finish_and_clear();
    let proven = suite.finish();
    conclude(&args, &suite, proven, Suite::verdict)
}

/// The command line that the one process of a section is started with, and hand-offs are asked for. Instances have other
/// layouts and pools.
fn section_args(section: &Section, args: &DemoArgs) -> DemoArgs {
    let mut args = args.clone();
    (args.max_tokens, args.ignore_eos) = (section.answer, true);
    let engine = &mut args.engine;
    (engine.attention, engine.arith) = (section.attention, section.arith);
    (engine.kv_dtype, engine.chunk) = (section.kv, section.chunk);
    engine.no_prefix_cache = !section.prefixes;
    let sequence = |tokens: usize| tokens as u64 + u64::from(section.answer);
    engine.max_model_len = u32::try_from(sequence(section.longest()) + 1).ok();
    // For what one instance has at the same time.
    let room = |tokens: usize| sequence(tokens).next_multiple_of(4 * section.page);
    let together = section.cases().map(|case| match case.how {
        How::InTurn => case.lengths().map(room).max().unwrap_or(0),
        How::AtOnce | How::WithOnePast(_) => case.lengths().map(room).sum(),
    });
    engine.pool_tokens = together.max().map(|tokens| tokens + BESIDE);
    if section.fault.is_some() {
        // The hand-off's own digests would find what is wrong on the way before anything is compared.
        (engine.inject, engine.no_digest) = (section.fault, true);
    }
    args
}

/// Runs the cases of a section on fresh instances.
async fn run_section(
    section: &Section,
    model: &Located,
    args: &DemoArgs,
    bar: &ProgressBar,
) -> Result<Vec<PairReport>, Failure> {
    let args = section_args(section, args);
    let plan = Plan::new(&args);
    let plan = if section.prefixes { plan.with_prefix_cache() } else { plan };
    let layouts = |names: &[&str]| -> Result<Vec<_>, Failure> {
        names.iter().map(|name| layout(&format!("{name},page={}", section.page))).collect()
    };
    let (prefills, decodes) = (layouts(&section.prefills)?, layouts(&section.decodes)?);
    let [sending, receiving] = section
        .pools
        .map(|pool| EngineArgs { pool_tokens: pool.or(args.engine.pool_tokens), ..args.engine.clone() });
    // Every prompt goes over whole.
    let receiving = EngineArgs { no_prefix_cache: true, ..receiving };
    let mut fleet = Fleet::start().await?;
    let sides = [
        Side { role: "prefill", layouts: &prefills, engine: &sending },
        Side { role: "decode", layouts: &decodes, engine: &receiving },
    ];
    let [prefills, decodes] = fleet.join(sides, model).await?;
    // It is asked in another order than prefill: where one goes on from an earlier prompt, the other computes all.
    let asked = section.cases().rev().flat_map(|case| &case.asked);
    let prompts = asked.map(|asked| asked.prompt.clone()).collect();
    let answers = Answers::of(prompts, model, &args, &plan).await?;
    let judge = Judge { args: &args, plan: &plan, answers: &answers };
    let mut reports = Vec::new();
    for pair in &section.pairs {
        let (Some(prefill), Some(decode)) = (prefills.get(pair.prefill), decodes.get(pair.decode)) else {
            return Err(Failure::new(Blame::Us, "an instance was not started"));
        };
        let names = [(&section.prefills, pair.prefill), (&section.decodes, pair.decode)];
        let [from, to] = names.map(|(names, number)| names.get(number).copied().unwrap_or_default());
        if let Some(before) = &section.before {
            // A fault that it shows is none of a case.
            let _ = disaggregated::run((prefill, decode), before, &args, |_| ()).await;
        }
        for case in &pair.cases {
            let (outcomes, refused) = run_case(case, judge, (prefill, decode)).await;
            let known = case.asked.iter().filter(|asked| asked.answer.is_some()).count();
            let right = report::right(known, &outcomes);
            let lengths = case.lengths().collect();
            let report = CaseReport::new(&case.name, lengths, section.fault, &outcomes, refused);
            reports.push(PairReport::new((from, to), right, report));
            bar.inc(1);
        }
    }
    if section.fault.is_none()
        && let Some(last) = reports.last_mut()
    {
        for instance in prefills.iter().chain(&decodes) {
            held(instance).await?.into_iter().for_each(|finding| last.case.find(finding));
        }
    }
    fleet.stop().await;
    Ok(reports)
}

/// What came of each prompt of a case, and who was refused.
async fn run_case(case: &Case, judge: Judge<'_>, pair: (&Handle, &Handle)) -> (Vec<Outcome>, Vec<Refused>) {
    match &case.how {
        How::InTurn => (judge.in_turn(&case.asked, pair).await, Vec::new()),
        How::AtOnce => (judge.at_once(&case.asked, pair).await, Vec::new()),
        How::WithOnePast(past) => {
            let (refused, mut outcomes) =
                tokio::join!(refused(past, judge.args, pair), judge.at_once(&case.asked, pair));
            match refused {
                Ok(refused) => (outcomes, vec![refused]),
                Err(finding) => {
                    outcomes.push(Outcome::failed(finding));
                    (outcomes, Vec::new())
                }
            }
        }
    }
}

/// Asks for a hand-off that can never be served: it has to be refused as the caller's, with the limit.
async fn refused(past: &Past, args: &DemoArgs, pair: (&Handle, &Handle)) -> Result<Refused, Finding> {
    let started = Instant::now();
    let what = format!("a prompt of {}", past.prompt.label);
    let limit = format!("the limit is {} (", past.limit);
    match disaggregated::run(pair, &past.prompt, args, |_| ()).await {
        Ok(_) => Err(Finding::not_refused(&what)),
        Err(problem) if problem.status().as_u16() == 400 && problem.cause.contains(&limit) => {
            Ok(Refused { what, seconds: started.elapsed().as_secs_f64() })
        }
        Err(problem) => Err(Finding::refused_otherwise(&what, &problem)),
    }
}

/// What an instance still holds when all of its requests are over.
async fn held(instance: &Handle) -> Result<Option<Finding>, Failure> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let ledger = instance.client.ledger().await?;
        let count = |name: &str| ledger.pointer(name).and_then(serde_json::Value::as_u64).unwrap_or(u64::MAX);
        let (pages, slots) = (count("/engine/pages_held"), count("/engine/slots_held"));
        if (pages, slots) == (0, 0) {
            return Ok(None);
        }
        if Instant::now() > deadline {
            return Ok(Some(Finding::held(&instance.group.instance, pages, slots)));
        }
        sleep(Duration::from_millis(20)).await;
    }
}
