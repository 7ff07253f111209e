//! The data path as ratios to ceilings that the same run measured with the same memory, on one connection and one
//! reader. Not for latency, and not for what the control plane adds.

mod ceilings;
mod mooncake;
mod naive;
mod nixl;
mod peer;
mod report;
mod world;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use kvferry_node::TransportKind;
use kvferry_plan::{CacheShape, LayerId, Part, PartShape};
use kvferry_transport::slots::EngineError;

use super::{
    check_svg,
    machine::{Machine, Spent},
    numbers::{counted, mean, median},
    print,
    rounds::Rounds,
    write_svg,
};
use crate::{args::TransportArg, failure::Failure, transports::caution_of};
use ceilings::{FanOut, Loopback};
use naive::{DescriptorEngine, Each, Naive};
use report::{Document, Measured, Way};
use world::{Case, World};

#[derive(Args, Debug)]
pub(crate) struct TransferBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// Also draw the rates into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How much to move
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Which transports: kvferry's own, or also Mooncake's TCP protocol, and NVIDIA NIXL and Mooncake's engine (which listens
    /// on all interfaces), packed as their transports do and naively as a peer would
    #[arg(long, value_enum, default_value_t = Which::Own)]
    transport: Which,
    /// Interleaved repetitions whose medians are reported
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Size {
    /// A few percent: that it works, not how fast
    Small,
    /// 32K latent tokens and 8K tokens of 8 KV heads, 8 layers each; 32K tokens of Kimi Linear
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// `tcp` and `shm`
    Own,
    /// `nixl`, `mooncake` and `mooncake-tcp` too
    All,
}

pub(super) fn run(args: &TransferBench) -> Result<ExitCode, Failure> {
    check_svg(args.svg.as_deref())?;
    if args.transport == Which::All {
        caution_of(TransportArg::Mooncake);
    }
    let (mut cases, mut congestion) = (Vec::new(), String::new());
    let makers = [latent, heads, kimi];
    let mut under_way = Rounds::new(makers.len() as u32 * (args.rounds + 1));
    for make in makers {
        let case = make(args.size)?;
        let loopback = Loopback::new()?;
        congestion.clone_from(&loopback.congestion);
        cases.push(measure(&case, &loopback, args, &mut under_way)?);
    }
    drop(under_way);
    let document = Document {
        version: 1,
        machine: Machine::here(),
        size: match args.size {
            Size::Small => "small",
            Size::Full => "full",
        },
        rounds: args.rounds,
        memory: "sealed memfd, pre-faulted, mapped in the machine's base pages",
        streams: 1,
        congestion,
        cases,
    };
    if let Some(path) = &args.svg {
        write_svg(path, &report::draw(&document))?;
    }
    print(&document, args.json, report::show)?;
    Ok(ExitCode::SUCCESS)
}

/// Latent rows of 1152 bytes, dense to DCP over four ranks.
fn latent(size: Size) -> Result<Case, Failure> {
    let tokens = if size == Size::Full { (32 << 10, 2048) } else { (1024, 256) };
    let layers = if size == Size::Full { 8 } else { 2 };
    let what = "bf16 latent rows of 1152 B";
    Case::new("dcp", what, &CacheShape::mla(layers, 576), ["tp=1,page=64", "tp=4,dcp=4,page=64"], tokens)
}

/// Key and value rows of 8 heads, cut at other heads.
fn heads(size: Size) -> Result<Case, Failure> {
    let tokens = if size == Size::Full { (8 << 10, 2048) } else { (512, 256) };
    let layers = if size == Size::Full { 8 } else { 2 };
    let what = "bf16 keys and values, 8 heads of 128";
    Case::new("heads", what, &CacheShape::gqa(layers, 8, 128), ["tp=2,page=64", "tp=3,page=64"], tokens)
}

/// One request of Kimi Linear 48B: 7 layers of latent rows, and 20 with a convolution of 4 taps and a matrix for each of
/// 32 heads of 128, whose size does not depend on the tokens. Small, the first 4 layers.
fn kimi(size: Size) -> Result<Case, Failure> {
    let (layers, tokens) = if size == Size::Full { (27, (32 << 10, 2048)) } else { (4, (512, 256)) };
    let latent = |layer: &LayerId| layer.0 % 4 == 3 || layer.0 == 26;
    let (mla, kda): (Vec<_>, Vec<_>) = (0..layers).map(LayerId).partition(latent);
    let rows = counted(mla.len() as u64, "layer");
    let what = format!("Kimi Linear 48B, {rows} of 1152 B rows and {} of KDA state", kda.len());
    let mut shape = CacheShape { parts: vec![PartShape::rows(Part::Latent, mla, 1, 576)] };
    shape.parts.extend(CacheShape::kda(kda, 32, 128, 4));
    Case::new("kimi", &what, &shape, ["tp=4,page=64", "tp=4,dcp=4,page=64"], tokens)
}

/// An engine of others, that has landing slots as a transport.
struct Engine {
    transport: TransportKind,
    name: &'static str,
    /// What it can do, in full and short.
    ceiling: (&'static str, &'static str),
    /// As a peer would start it.
    start: fn() -> Result<Box<dyn DescriptorEngine>, EngineError>,
}

const ENGINES: [Engine; 2] = [
    Engine {
        transport: TransportKind::Nixl,
        name: "nixl",
        ceiling: ("NIXL, one descriptor a layer", "NIXL, layer"),
        start: nixl::start,
    },
    Engine {
        transport: TransportKind::Mooncake,
        name: "mooncake",
        ceiling: ("Mooncake, one descriptor a layer", "Mooncake, layer"),
        start: mooncake::start,
    },
];

/// Times of one way, one per round.
#[derive(Default)]
struct Times {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

impl Times {
    fn take(&mut self, run: impl FnOnce() -> Result<Duration, Failure>) -> Result<(), Failure> {
        let before = Spent::now();
        let wall = run()?;
        self.cpu.push(before.own());
        self.wall.push(wall.as_secs_f64());
        Ok(())
    }
}

/// What a way is compared with.
struct Ceiling<'a> {
    name: &'static str,
    short: &'static str,
    run: Box<dyn Fn() -> Result<Duration, Failure> + 'a>,
    times: Times,
    ways: Vec<Subject<'a>>,
}

/// A way that is measured.
struct Subject<'a> {
    transport: &'static str,
    digests: bool,
    /// What an engine of others gets a descriptor for, and how many it gets. Unknown before it has run: blocks.
    descriptor: Option<&'static str>,
    descriptors: Box<dyn Fn() -> Option<u64> + 'a>,
    /// As a peer uses it.
    naive: bool,
    run: Box<dyn Fn() -> Result<Duration, Failure> + 'a>,
    times: Times,
}

impl<'a> Ceiling<'a> {
    fn new(
        (name, short): (&'static str, &'static str),
        run: impl Fn() -> Result<Duration, Failure> + 'a,
        ways: Vec<Subject<'a>>,
    ) -> Self {
        Self { name, short, run: Box::new(run), times: Times::default(), ways }
    }

    fn ways(&self, gb: f64) -> impl Iterator<Item = Way> {
        self.ways.iter().map(move |way| {
            let wall = &way.times.wall;
            let ratios: Vec<f64> = self.times.wall.iter().zip(wall).map(|(c, t)| c / t).collect();
            let lowest = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
            let highest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
            Way {
                transport: way.transport,
                descriptor: way.descriptor,
                descriptors: (way.descriptors)(),
                naive: way.naive,
                digests: way.digests,
                gb_per_s: gb / median(wall),
                gb_per_s_lowest: gb / highest(wall),
                gb_per_s_highest: gb / lowest(wall),
                cpu_s_per_gb: mean(&way.times.cpu) / gb,
                ceiling: self.name,
                ceiling_short: self.short,
                ceiling_gb_per_s: gb / median(&self.times.wall),
                ceiling_cpu_s_per_gb: mean(&self.times.cpu) / gb,
                ratio: median(&ratios),
                ratio_lowest: lowest(&ratios),
                ratio_highest: highest(&ratios),
            }
        })
    }
}

/// A hand-off without and with digests.
fn hand_offs<'a>(
    world: &'a World<'_>,
    transport: &'static str,
    descriptor: Option<&'static str>,
) -> Vec<Subject<'a>> {
    let way = |digests| Subject {
        transport,
        digests,
        descriptor,
        descriptors: Box::new(move || descriptor.map(|_| world.blocks())),
        naive: false,
        run: Box::new(move || world.hand_off(digests)),
        times: Times::default(),
    };
    vec![way(false), way(true)]
}

/// An engine as a peer uses it, where that is not too many descriptors.
fn as_a_peer<'a>(naive: &'a Naive<'_>, transport: &'static str) -> impl Iterator<Item = Subject<'a>> {
    [Each::Page, Each::Row].into_iter().filter(|each| naive.descriptors(*each).is_some()).map(move |each| {
        Subject {
            transport,
            digests: false,
            descriptor: Some(each.name()),
            descriptors: Box::new(move || naive.descriptors(each)),
            naive: true,
            run: Box::new(move || naive.run(each)),
            times: Times::default(),
        }
    })
}

fn measure(
    case: &Case,
    loopback: &Loopback,
    args: &TransferBench,
    under_way: &mut Rounds,
) -> Result<Measured, Failure> {
    let fan_out = FanOut::new(case)?;
    let tcp = World::new(TransportKind::Tcp, case)?;
    let shm = World::new(TransportKind::Shm, case)?;
    let all = args.transport == Which::All;
    let mooncake = all.then(|| World::new(TransportKind::MooncakeTcp, case)).transpose()?;
    let engines = if all { &ENGINES[..] } else { &[] };
    let engines = engines
        .iter()
        .map(|engine| Ok((engine, World::new(engine.transport, case)?, Naive::new(case, engine.start)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let mut over_tcp = hand_offs(&tcp, "tcp", None);
    over_tcp.extend(mooncake.iter().flat_map(|world| hand_offs(world, "mooncake-tcp", Some("block"))));
    let mut copy = Times::default();
    let mut ceilings = vec![
        Ceiling::new(("raw loopback TCP", "raw TCP"), || loopback.run(case), over_tcp),
        Ceiling::new(("one sweep of copies", "one sweep"), || fan_out.run(), hand_offs(&shm, "shm", None)),
    ];
    for (engine, world, naive) in &engines {
        let mut ways = hand_offs(world, engine.name, Some("block"));
        ways.extend(as_a_peer(naive, engine.name));
        ceilings.push(Ceiling::new(engine.ceiling, || naive.run(Each::Layer), ways));
    }
    // The first round warms up: connections grow their windows, and the target's pages become the cache's.
    for round in 0..=args.rounds {
        under_way.begin(case.name, round);
        if round == 1 {
            copy = Times::default();
            for ceiling in &mut ceilings {
                ceiling.times = Times::default();
                ceiling.ways.iter_mut().for_each(|way| way.times = Times::default());
            }
        }
        copy.take(|| ceilings::memcpy(case))?;
        for Ceiling { run, times, ways, .. } in &mut ceilings {
            times.take(run)?;
            for way in ways {
                way.times.take(&way.run)?;
            }
        }
    }
    for (_, _, naive) in &engines {
        naive.check()?;
    }
    let gb = case.bytes.0 as f64 / 1e9;
    Ok(Measured {
        name: case.name,
        what: case.what.clone(),
        bytes: case.bytes.0,
        tokens: case.tokens,
        chunk_tokens: case.chunk,
        memcpy_gb_per_s: gb / median(&copy.wall),
        ways: ceilings.iter().flat_map(|ceiling| ceiling.ways(gb)).collect(),
    })
}
