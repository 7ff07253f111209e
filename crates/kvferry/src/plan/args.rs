//! The arguments. Doc comments here are help texts.

use std::path::PathBuf;

use clap::Args;
use kvferry_engine::EngineConfig;

use crate::args::POOL_TOKENS;

pub(super) const EXAMPLES: &str = "\
Examples:
  Four ranks that hold the same latent rows, to four that share them out:
    kvferry plan --prefill tp=4 --decode tp=4,dcp=4 \\
      --model-shape mla:61x576xbf16 --tokens 32768 --page 64
  The same to a decode side that keeps fp8, which prefill converts to:
    kvferry plan --prefill tp=4 --decode tp=4,dcp=4,kv=fp8 --convert-kv \\
      --model-shape mla:61x576xbf16 --tokens 32768 --page 64
  Which prompts pools of 128K tokens let in, and their memory per rank:
    kvferry plan --capacity --prefill tp=4,shard=on --decode tp=4,dcp=4 \\
      --model-shape mla:61x576xbf16 --pool-tokens 131072 --page 64";

#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// A request as JSON, `-` for standard input; docs/plan.md has the schema. Or say it with the options below
    #[arg(value_name = "FILE", conflicts_with_all = ["prefill", "decode", "model_shape", "tokens", "page", "convert_kv",
          "scattered"])]
    pub(crate) request: Option<PathBuf>,
    /// Layout of the prefill instance: keys tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv
    #[arg(long, value_name = "SPEC", default_value = "tp=1", help_heading = "Request")]
    pub(crate) prefill: String,
    /// Layout of the decode instance
    #[arg(long, value_name = "SPEC", default_value = "tp=1", help_heading = "Request")]
    pub(crate) decode: String,
    /// What the model caches; needed unless FILE says it. For example mla:61x576xbf16, gqa:30x3x64xf32, or
    /// mla:7x576xbf16@3/7/11/15/19/23/26+kda:20x32x128
    #[arg(long, value_name = "SHAPE", help_heading = "Request")]
    pub(crate) model_shape: Option<String>,
    /// How many tokens, or which: 32768, or 100..32768 when decode holds the first hundred already
    #[arg(long, value_name = "TOKENS", default_value = "1024", help_heading = "Request")]
    pub(crate) tokens: String,
    /// Rows of one page, on the sides whose layout does not say `page`
    #[arg(long, value_name = "ROWS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536),
          help_heading = "Request")]
    pub(crate) page: u32,
    /// Let prefill convert what decode keeps in another element type; else two that differ are not supported
    #[arg(long, help_heading = "Request")]
    pub(crate) convert_kv: bool,
    /// Page ids in no order, as in a pool that has been in use for a while, instead of 0, 1, 2, ...
    #[arg(long, help_heading = "Request")]
    pub(crate) scattered: bool,
    /// Say which prompts pools of a size let in, and what they take on each rank, instead of what crosses
    #[arg(long, conflicts_with_all = ["tokens", "scattered", "rows", "svg"])]
    pub(crate) capacity: bool,
    /// With --capacity: tokens that the pool of each side holds
    #[arg(long, value_name = "TOKENS", default_value_t = POOL_TOKENS, requires = "capacity")]
    pub(crate) pool_tokens: u64,
    /// With --capacity: states that the pool of each side holds, of a shape with state per request
    #[arg(long, value_name = "STATES", default_value_t = EngineConfig::default().state_slots,
          value_parser = clap::value_parser!(u32).range(1..), requires = "capacity")]
    pub(crate) state_slots: u32,
    /// Print one JSON object, with all runs
    #[arg(long)]
    pub(crate) json: bool,
    /// Print every row that moves: layer, source rank and row, target rank and row (small requests)
    #[arg(long)]
    pub(crate) rows: bool,
    /// Draw who holds and who moves what
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}
