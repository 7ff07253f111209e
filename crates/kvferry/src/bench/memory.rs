//! What a rank's cache takes of memory with KV sharding and without: what engines have allocated, not what a formula
//! says. Not for how fast they are, nor for weights and workspaces.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, sync::Arc};

use clap::Args;
use comfy_table::CellAlignment;
use kvferry_arena::Memory as _;
use kvferry_engine::{
    Attention, Engine, EngineConfig, LoadOptions, Model, NoHandOff, checkpoint::ModelConfig,
};
use kvferry_plan::{LayerId, LayoutSpec};
use serde::Serialize;
use tokio::runtime::Runtime;

use super::{
    chart::{Bar, Chart, Group},
    check_svg,
    numbers::counted,
    print, write_svg,
};
use crate::{
    failure::Failure,
    model::{self, ModelRef, Progress},
    terminal::{self, number},
};

/// Over how many ranks the pages are dealt.
const RANKS: [u32; 3] = [1, 2, 4];
/// Prompt tokens of a step.
const CHUNK: u32 = 256;

#[derive(Args, Debug)]
pub(crate) struct MemoryBench {
    /// Print one JSON object (docs/bench.md names its fields)
    #[arg(long)]
    json: bool,
    /// Also draw the context per rank into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// smollm2, a GGUF file, a Hugging Face folder, hf:owner/repo/file, or embedded:NAME [default: smollm2, else
    /// embedded:needle_kimi]
    #[arg(long)]
    model: Option<ModelRef>,
    /// Tokens of the longest sequence, for which the pool has room; at most what the model was made for
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(256..=1_000_000))]
    context: u32,
}

/// The ranks that have the same cache when it is not sharded.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Over {
    Tp,
    Cp,
}

/// One number of ranks.
#[derive(Debug, Serialize)]
struct Row {
    ranks: u32,
    unsharded_kv_bytes: u64,
    kv_bytes: u64,
    /// Sharded as part of unsharded.
    ratio: f64,
    unsharded_pool_bytes: u64,
    pool_bytes: u64,
    page_bytes: u64,
    scratch_bytes: u64,
    /// Two layers' rows of the context and of one chunk.
    scratch_most_bytes: u64,
    /// Tokens in as much KV memory of a rank as the context takes unsharded.
    context_tokens: u64,
    /// A rank has at most its share, one page and the scratch.
    holds: bool,
}

#[derive(Debug, Serialize)]
struct Case {
    attention: &'static str,
    over: Over,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Document {
    version: u32,
    model: String,
    context_tokens: u32,
    page_tokens: u32,
    chunk_tokens: u32,
    cases: Vec<Case>,
}

pub(super) fn run(args: &MemoryBench, runtime: &Runtime) -> Result<ExitCode, Failure> {
    check_svg(args.svg.as_deref())?;
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let located = runtime.block_on(model::or_embedded(args.model.as_ref(), progress))?;
    let checkpoint = located.open()?;
    let config = checkpoint.config();
    let context = args.context.min(config.longest_possible());
    let kinds = cases(config);
    let bar = progress.things("engines", (kinds.len() * RANKS.len()) as u64);
    let cases = kinds.into_iter().map(|(attention, name, over)| {
        let options = LoadOptions { attention, ..LoadOptions::default() };
        let model = Model::from_checkpoint(&checkpoint, options)?;
        let rows = RANKS.into_iter().map(|ranks| {
            let row = row(&model, over, ranks, context);
            bar.inc(1);
            row
        });
        Ok(Case { attention: name, over, rows: rows.collect::<Result<_, Failure>>()? })
    });
    let document = Document {
        version: 1,
        model: checkpoint.name().to_owned(),
        context_tokens: context,
        page_tokens: LayoutSpec::default().page,
        chunk_tokens: CHUNK,
        cases: cases.collect::<Result<_, Failure>>()?,
    };
    bar.finish_and_clear();
    if let Some(path) = &args.svg {
        write_svg(path, &draw(&document))?;
    }
    print(&document, args.json, show)?;
    let holds = document.cases.iter().flat_map(|case| &case.rows).all(|row| row.holds);
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Forms of attention, and the ranks that would have the same rows in each.
fn cases(config: &ModelConfig) -> Vec<(Attention, &'static str, Over)> {
    let own = |name| vec![(Attention::Gqa, name, Over::Tp), (Attention::Gqa, name, Over::Cp)];
    match (&config.kda, &config.mla) {
        (Some(_), _) => own("hybrid"),
        (None, Some(_)) => own("mla"),
        // Ranks of a TP group have different heads.
        (None, None) => vec![(Attention::Mla, "mla", Over::Tp), (Attention::Gqa, "gqa", Over::Cp)],
    }
}

fn row(model: &Arc<Model>, over: Over, ranks: u32, context: u32) -> Result<Row, Failure> {
    let layout = match over {
        Over::Tp => LayoutSpec { tp: ranks, ..LayoutSpec::default() },
        Over::Cp => LayoutSpec { cp: ranks, ..LayoutSpec::default() },
    };
    // One after the other: what they have is allocated, whether anybody writes there or not.
    let unsharded = Taken::of(model, layout.clone(), context)?;
    let sharded = match ranks {
        1 => unsharded,
        _ => Taken::of(model, LayoutSpec { shard: true, ..layout }, context)?,
    };
    let scratch_most = 2 * sharded.layer * u64::from(context + CHUNK);
    let share = unsharded.kv.div_ceil(ranks.into()) + sharded.page;
    Ok(Row {
        ranks,
        unsharded_kv_bytes: unsharded.kv,
        kv_bytes: sharded.kv,
        ratio: sharded.kv as f64 / unsharded.kv as f64,
        unsharded_pool_bytes: unsharded.pool,
        pool_bytes: sharded.pool,
        page_bytes: sharded.page,
        scratch_bytes: sharded.scratch,
        scratch_most_bytes: scratch_most,
        context_tokens: u64::from(context) * unsharded.kv / sharded.kv.max(1),
        holds: sharded.kv <= share && sharded.scratch <= scratch_most,
    })
}

/// What the rank of an engine has that has most, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// The arena: generation words, rows, and state if there is some.
    pool: u64,
    /// The rows in it.
    kv: u64,
    /// One page in all layers.
    page: u64,
    /// One token's rows in the widest layer.
    layer: u64,
    scratch: u64,
}

impl Taken {
    fn of(model: &Arc<Model>, layout: LayoutSpec, context: u32) -> Result<Self, Failure> {
        let config = EngineConfig {
            layout,
            chunk: CHUNK,
            max_model_len: Some(context),
            pool_tokens: context.into(),
            state_slots: 1,
            ..EngineConfig::default()
        };
        let engine = Engine::start(Arc::clone(model), &config, Arc::new(NoHandOff))?;
        let mut most = Self { scratch: engine.stats().scratch_bytes, ..Self::default() };
        for arena in engine.arenas() {
            let layout = arena.layout();
            let (mut kv, mut layers) = (0, BTreeMap::<LayerId, u64>::new());
            for region in layout.regions().iter().filter(|region| !region.part.is_state()) {
                kv += region.rows * region.row_bytes.0;
                *layers.entry(region.layer).or_default() += region.row_bytes.0;
            }
            most.pool = most.pool.max(layout.len().0);
            most.kv = most.kv.max(kv);
            most.page = most.page.max(kv / u64::from(layout.pages().max(1)));
            most.layer = layers.into_values().fold(most.layer, u64::max);
        }
        Ok(most)
    }
}

impl Case {
    fn name(&self) -> String {
        let over = match self.over {
            Over::Tp => "tp",
            Over::Cp => "cp",
        };
        format!("{} over {over}", self.attention)
    }
}

fn show(document: &Document) {
    let Document { model, context_tokens, chunk_tokens, cases, .. } = document;
    let [context, chunk] = [context_tokens, chunk_tokens].map(|n| number((*n).into()));
    terminal::paragraph(format_args!("{model}: pools for {context} tokens in f32, steps of {chunk}"), 2);
    let mut table = terminal::table();
    table.set_header(["", "ranks", "KV of a rank", "part", "scratch", "at most", "context"]);
    let mib = |bytes: u64| format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20));
    for case in cases {
        for row in &case.rows {
            let scratch = [row.scratch_bytes, row.scratch_most_bytes];
            let [scratch, most] = scratch.map(|bytes| if row.ranks > 1 { mib(bytes) } else { "-".into() });
            table.add_row([
                case.name(),
                row.ranks.to_string(),
                mib(row.kv_bytes),
                format!("{:.3}", row.ratio),
                scratch,
                most,
                number(row.context_tokens),
            ]);
        }
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(table);
    terminal::paragraph(
        "part: of what a rank has without sharding; scratch: where it puts the rows of all ranks together, at most two \
         layers' of the longest context and of a chunk; context: tokens in as much KV memory of a rank as without sharding",
        2,
    );
    for case in cases {
        for row in case.rows.iter().filter(|row| !row.holds) {
            let ranks = counted(row.ranks.into(), "rank");
            terminal::paragraph(
                format_args!("{}, {ranks}: more than a share, a page and the scratch", case.name()),
                2,
            );
        }
    }
}

fn draw(document: &Document) -> String {
    let bar = |row: &Row| {
        let value = row.unsharded_kv_bytes as f64 / row.kv_bytes as f64;
        let label = counted(row.ranks.into(), "rank");
        Bar { label, value, low: value, high: value, mark: None, series: 0 }
    };
    let group = |case: &Case| Group { name: case.name(), bars: case.rows.iter().map(bar).collect() };
    let context = number(document.context_tokens.into());
    let chart = Chart {
        title: "kvferry bench memory: context in the same memory of a rank",
        note: &format!("{}; measured with pools for {context} tokens", document.model),
        one: Some("unsharded"),
        mark: None,
        series: &["KV sharding"],
        groups: document.cases.iter().map(group).collect(),
    };
    chart.draw()
}
