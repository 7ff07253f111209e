//! `kvferry demo --suite kimi-dcp`: Kimi Linear from TP4/EP4 to TP4/DCP4. Prompts at every edge of pages and chunks, many
//! at once, and one prefill that serves two decodes while others, which cannot be served, are refused; then deliberate
//! faults, which have to be found. What decode holds and answers is compared with one process that has one rank.

mod cases;
mod misfits;
mod report;

use std::process::ExitCode;

use futures_util::future::join_all;
use indicatif::ProgressBar;
use kvferry_plan::Blame;
use kvferry_server::Compute;
use tokio::sync::oneshot;

use super::{
    cluster::{Fleet, Handle, Side},
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
    model::{Located, Progress},
};
use cases::{Case, How, Section};
use misfits::Misfit;
use report::Suite;

/// Layouts of the two sides.
const PREFILL: &str = "tp=4,ep=4,page=64";
const DECODE: &str = "tp=4,dcp=4,page=64";
/// The decode side that is served beside the first.
const SINGLE: &str = "tp=1,page=64";
/// Rooms that a prompt has at the same time in prefill: with two decodes, and three misfits.
const ROOMS: usize = 5;
/// Tokens of the largest unit that a pool is filled by.
const VIRTUAL_PAGE: usize = 256;

/// Runs the suite; the exit status says whether every case was as it has to be.
pub(crate) async fn run(args: DemoArgs) -> Result<ExitCode, Failure> {
    own_models(&args)?;
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let sections = cases::all(args.quick);
    let mut suite = Suite::new(&args, PREFILL, DECODE);
    if !args.json {
        suite.title();
    }
    let cases = sections.iter().map(|section| section.cases.len()).sum::<usize>();
    let bar = progress.things("cases", cases as u64);
    for section in &sections {
        let (found, compute) = run_section(section, &args, &bar).await?;
        suite.push(section, found, compute);
        if !args.json {
            bar.suspend(|| suite.print_last());
        }
    }
    bar.finish_and_clear();
    let proven = suite.finish();
    conclude(&args, &suite, proven, Suite::verdict)
}

/// The command line that the instances of a section and its reference are started with.
fn section_args(section: &Section, args: &DemoArgs) -> Result<DemoArgs, Failure> {
    let mut args = args.clone();
    (args.prefill, args.decode) = (layout(PREFILL)?, layout(DECODE)?);
    (args.max_tokens, args.ignore_eos) = (section.answer, true);
    let engine = &mut args.engine;
    (engine.arith, engine.kv_dtype, engine.chunk) = (section.arith, section.kv, section.chunk);
    engine.no_prefix_cache = !section.prefixes;
    engine.decode_batch = section.form;
    let sequence = |tokens: usize| tokens + section.answer as usize;
    engine.max_model_len = u32::try_from(sequence(section.longest())).ok();
    // For what one instance has at the same time.
    let room = |tokens: usize| sequence(tokens).next_multiple_of(VIRTUAL_PAGE);
    let together = |case: &Case| match case.how {
        How::InTurn => case.lengths().map(room).max().unwrap_or(0),
        How::AtOnce | How::Joining => case.lengths().map(room).sum(),
        How::Several => ROOMS * case.lengths().map(room).sum::<usize>(),
    };
    let together = section.cases.iter().map(|case| together(case) as u64).max();
    // Prefill keeps room beside a prompt.
    engine.pool_tokens = together.max(Some(args.prefill.pool_for_prompt(section.longest() as u64)));
    if section.fault.is_some() {
        // The hand-off's own digests would find what is wrong on the way before anything is compared.
        (engine.inject, engine.no_digest) = (section.fault, true);
    }
    Ok(args)
}

/// Runs the cases of a section on fresh instances.
async fn run_section(
    section: &Section,
    args: &DemoArgs,
    bar: &ProgressBar,
) -> Result<(Vec<CaseReport>, Compute), Failure> {
    let args = section_args(section, args)?;
    let plan = Plan::new(&args);
    let plan = if section.prefixes { plan.with_prefix_cache() } else { plan };
    let located = Located::Embedded(section.model);
    let (mut decodes, single) = (vec![args.decode.clone()], layout(SINGLE)?);
    if section.several() {
        decodes.push(single.clone());
    }
    let mut fleet = Fleet::start().await?;
    // Every prompt goes over whole.
    let receiving = EngineArgs { no_prefix_cache: true, ..args.engine.clone() };
    let sides = [
        Side { role: "prefill", layouts: std::slice::from_ref(&args.prefill), engine: &args.engine },
        Side { role: "decode", layouts: &decodes, engine: &receiving },
    ];
    let [prefill, decodes] = fleet.join(sides, &located).await?;
    let [prefill] = prefill.as_slice() else {
        return Err(Failure::new(Blame::Us, "one prefill instance was asked for"));
    };
    let misfits = match decodes.get(1) {
        Some(fits) => Misfit::all(&mut fleet, section, &args, (&single, fits)).await?,
        None => Vec::new(),
    };
    // It is asked in another order than prefill, which thus goes on from what was computed before in some of the cases in
    // which this process computes all, and the other way around.
    let asked = section.cases.iter().rev().flat_map(|case| &case.asked);
    let prompts = asked.map(|asked| asked.prompt.clone()).collect();
    let answers = Answers::of(prompts, &located, &args, &plan).await?;
    let (decodes, misfits) = (decodes.as_slice(), misfits.as_slice());
    let judge = Judge { args: &args, plan: &plan, answers: &answers };
    let world = World { judge, prefill, decodes, misfits };
    let mut reports = Vec::with_capacity(section.cases.len());
    for case in &section.cases {
        let (outcomes, refused) = world.case(case).await;
        let lengths = case.lengths().collect();
        reports.push(CaseReport::new(&case.name, lengths, section.fault, &outcomes, refused));
        bar.inc(1);
    }
    let compute = match decodes.first() {
        Some(dealt) => dealt.client.health().await.map(|health| health.compute).unwrap_or_default(),
        None => Compute::default(),
    };
    if let Some(last) = reports.last_mut().filter(|_| section.fault.is_none())
        && let Some(wrong) = report::wrong_form(section.form, compute)
    {
        last.find(wrong);
    }
    fleet.stop().await;
    Ok((reports, compute))
}

/// The instances of a section and what is right.
struct World<'a> {
    judge: Judge<'a>,
    prefill: &'a Handle,
    decodes: &'a [Handle],
    misfits: &'a [Misfit],
}

impl World<'_> {
    /// Hands the prompts of a case over; what came of each, and who was refused.
    async fn case(&self, case: &Case) -> (Vec<Outcome>, Vec<Refused>) {
        let Some(dealt) = self.decodes.first() else {
            return (vec![Outcome::failed(Finding::no_reference())], Vec::new());
        };
        let pair = (self.prefill, dealt);
        match case.how {
            How::InTurn => (self.judge.in_turn(&case.asked, pair).await, Vec::new()),
            How::AtOnce => (self.judge.at_once(&case.asked, pair).await, Vec::new()),
            How::Joining => {
                let mut before: Option<oneshot::Receiver<()>> = None;
                let each = case.asked.iter().map(|asked| {
                    let (tell, told) = oneshot::channel();
                    let wait = before.replace(told);
                    async move {
                        if let Some(wait) = wait {
                            // One that fails before its first token tells nothing: then this one begins as well.
                            let _ = wait.await;
                        }
                        let mut tell = Some(tell);
                        let on_token = || {
                            // Nobody waits for the last one.
                            let _ = tell.take().map(|tell| tell.send(()));
                        };
                        self.judge.hand_over(asked, pair, on_token).await
                    }
                });
                let each: Vec<_> = each.collect();
                (join_all(each).await, Vec::new())
            }
            How::Several => {
                let each = |decode| self.judge.at_once(&case.asked, (self.prefill, decode));
                let tried = self.misfits.iter().flat_map(|misfit| {
                    case.asked.iter().map(|asked| misfit.refused(self.prefill, &asked.prompt))
                });
                let (outcomes, tried) =
                    tokio::join!(join_all(self.decodes.iter().map(each)), join_all(tried));
                let mut outcomes = outcomes.concat();
                let (mut refused, mut findings) = (Vec::new(), Vec::new());
                tried.into_iter().for_each(|tried| match tried {
                    Ok(one) => refused.push(one),
                    Err(finding) => findings.push(finding),
                });
                outcomes.extend(findings.into_iter().map(Outcome::failed));
                (outcomes, refused)
            }
        }
    }
}
