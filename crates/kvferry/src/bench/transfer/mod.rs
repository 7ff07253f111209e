//! The data path as ratios to ceilings that the same run measured with the same memory, on one connection and one
//! reader. Not for latency, and not for what the control plane adds.

mod ceilings;
mod nixl;
mod world;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use comfy_table::CellAlignment;
use kvferry_node::TransportKind;
use kvferry_plan::{CacheShape, LayerId, Part, PartShape};
use serde::Serialize;

use super::{
    chart::{Bar, Chart, Group},
    check_svg,
    machine::{Machine, Spent},
    numbers::{counted, mean, median, ratio},
    only_works, print,
    rounds::Rounds,
    write_svg,
};
use crate::{failure::Failure, terminal};
use ceilings::{FanOut, Loopback};
use nixl::{Each, Naive};
use world::{Case, World};

#[derive(Args, Debug)]
pub(crate) struct TransferBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// Also draw the ratios into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How much to move
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Which transports: kvferry's own, or also Mooncake's TCP protocol and NVIDIA NIXL, packed as `--transport nixl` does and
    /// naively as a peer would
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
    /// `nixl` and `mooncake-tcp` too
    All,
}

/// One way of one case.
#[derive(Debug, Serialize)]
struct Way {
    transport: &'static str,
    /// What an engine of others gets a descriptor for; nothing for kvferry's own transports.
    descriptor: Option<&'static str>,
    digests: bool,
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    ceiling: &'static str,
    #[serde(skip)]
    ceiling_short: &'static str,
    ceiling_gb_per_s: f64,
    ceiling_cpu_s_per_gb: f64,
    ratio: f64,
    ratio_lowest: f64,
    ratio_highest: f64,
}

impl Way {
    fn name(&self) -> String {
        match self.descriptor {
            None => self.transport.into(),
            Some(each) => format!("{}, {each}", self.transport),
        }
    }
}

#[derive(Debug, Serialize)]
struct Measured {
    name: &'static str,
    what: String,
    bytes: u64,
    tokens: u64,
    chunk_tokens: u64,
    memcpy_gb_per_s: f64,
    ways: Vec<Way>,
}

#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    machine: Machine,
    size: &'static str,
    rounds: u32,
    memory: &'static str,
    streams: u32,
    congestion: String,
    cases: Vec<Measured>,
}

pub(super) fn run(args: &TransferBench) -> Result<ExitCode, Failure> {
    check_svg(args.svg.as_deref())?;
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
        write_svg(path, &draw(&document))?;
    }
    print(&document, args.json, show)?;
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
    descriptor: Option<&'static str>,
    digests: bool,
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
            let ratios: Vec<f64> = self.times.wall.iter().zip(&way.times.wall).map(|(c, t)| c / t).collect();
            Way {
                transport: way.transport,
                descriptor: way.descriptor,
                digests: way.digests,
                gb_per_s: gb / median(&way.times.wall),
                cpu_s_per_gb: mean(&way.times.cpu) / gb,
                ceiling: self.name,
                ceiling_short: self.short,
                ceiling_gb_per_s: gb / median(&self.times.wall),
                ceiling_cpu_s_per_gb: mean(&self.times.cpu) / gb,
                ratio: median(&ratios),
                ratio_lowest: ratios.iter().copied().fold(f64::INFINITY, f64::min),
                ratio_highest: ratios.iter().copied().fold(0.0, f64::max),
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
        descriptor,
        digests,
        run: Box::new(move || world.hand_off(digests)),
        times: Times::default(),
    };
    vec![way(false), way(true)]
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
    let (mooncake, nixl) = match args.transport {
        Which::Own => (None, None),
        Which::All => (
            Some(World::new(TransportKind::MooncakeTcp, case)?),
            Some((World::new(TransportKind::Nixl, case)?, Naive::new(case)?)),
        ),
    };
    let mut over_tcp = hand_offs(&tcp, "tcp", None);
    over_tcp.extend(mooncake.iter().flat_map(|world| hand_offs(world, "mooncake-tcp", None)));
    let mut copy = Times::default();
    let mut ceilings = vec![
        Ceiling::new(("raw loopback TCP", "raw TCP"), || loopback.run(case), over_tcp),
        Ceiling::new(("one sweep of copies", "one sweep"), || fan_out.run(), hand_offs(&shm, "shm", None)),
    ];
    if let Some((world, naive)) = &nixl {
        let mut ways = hand_offs(world, "nixl", Some("block"));
        let rows = Some(("row", Each::Row)).filter(|_| naive.has_rows());
        for (descriptor, each) in [("page", Each::Page)].into_iter().chain(rows) {
            ways.push(Subject {
                transport: "nixl",
                descriptor: Some(descriptor),
                digests: false,
                run: Box::new(move || naive.run(each)),
                times: Times::default(),
            });
        }
        let run = || naive.run(Each::Region);
        ceilings.push(Ceiling::new(("NIXL, one descriptor a layer", "layer"), run, ways));
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
    if let Some((_, naive)) = nixl.as_ref().filter(|(_, naive)| naive.has_rows()) {
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

fn show(document: &Document) {
    let Document { machine, rounds, congestion, .. } = document;
    terminal::paragraph(machine, 2);
    let interleaved = counted((*rounds).into(), "interleaved round");
    let what = format!("{interleaved}; tcp: one stream, {congestion}, both ends here");
    terminal::paragraph(what, 2);
    for case in &document.cases {
        let Measured { name, what, tokens, chunk_tokens, memcpy_gb_per_s, .. } = case;
        let (mb, copy) = (case.bytes as f64 / 1e6, format!("plain memcpy {memcpy_gb_per_s:.2} GB/s"));
        terminal::paragraph(format_args!("\n{name}: {what}"), 2);
        let [tokens, chunk] = [*tokens, *chunk_tokens].map(terminal::number);
        terminal::line(format_args!("{tokens} tokens in chunks of {chunk}, {mb:.0} MB; {copy}"));
        // Of so few clock ticks that they say nothing, none are told.
        let cpu = |per_gb: f64| match per_gb * case.bytes as f64 / 1e9 * f64::from(*rounds) {
            spent if spent < Spent::FEW => "-".to_owned(),
            _ => format!("{per_gb:.2}"),
        };
        let mut table = terminal::table();
        table.set_header(["", "digests", "GB/s", "CPU\ns/GB", "ceiling", "GB/s", "CPU\ns/GB", "ratio"]);
        for way in &case.ways {
            table.add_row([
                // At most as wide as the others, broken where it reads well.
                way.name().replace("mooncake-", "mooncake-\n"),
                if way.digests { "on" } else { "off" }.to_owned(),
                format!("{:.2}", way.gb_per_s),
                cpu(way.cpu_s_per_gb),
                // The columns are narrow; `--json` has the whole name.
                way.ceiling_short.to_owned(),
                format!("{:.2}", way.ceiling_gb_per_s),
                cpu(way.ceiling_cpu_s_per_gb),
                ratio(way.ratio, way.ratio_lowest, way.ratio_highest),
            ]);
        }
        for (i, column) in table.column_iter_mut().enumerate() {
            if !matches!(i, 0 | 4) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        terminal::line(table);
    }
    if document.size == "small" {
        only_works("--size small");
    }
}

fn draw(document: &Document) -> String {
    let bar = |way: &Way| Bar {
        label: way.name(),
        value: way.ratio,
        low: way.ratio_lowest,
        high: way.ratio_highest,
        series: usize::from(way.digests),
    };
    let group = |case: &Measured| Group {
        name: format!("{}: {}", case.name, case.what),
        bars: case.ways.iter().map(bar).collect(),
    };
    let note = format!("{}; {}, medians", document.machine, counted(document.rounds.into(), "round"));
    let chart = Chart {
        title: "kvferry bench transfer: rate of a hand-off as part of the ceiling in the same run",
        note: &note,
        one: "ceiling",
        series: &["without digests", "with digests"],
        groups: document.cases.iter().map(group).collect(),
    };
    chart.draw()
}
