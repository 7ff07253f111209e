//! Decode sides that cannot be served. Each hand-off to one has to be refused, soon, and both ends have to say why.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvferry_arena::Arena;
use kvferry_engine::checkpoint::Embedded;
use kvferry_node::{Node, NodeConfig, PeerAddr, Receive};
use kvferry_plan::{
    Attempt, Blame, Dtype, InstanceId, LayoutSpec, PageTable, PoolLayout, PoolSize, RankId, RoomKey, SlotId,
    TokenRange,
};
use kvferry_registry::Group;
use kvferry_server::{
    DecodeRecord, DecodeRequest, InstanceClient, PrefillRequest, Problem, SamplingSpec, Stage, mint_room,
};
use kvferry_session::Prompt as Digest;

use super::cases::Section;
use crate::{
    args::DemoArgs,
    demo::{
        cluster::{Fleet, Handle},
        prompts::Prompt,
        report::Finding,
        suite::report::Refused,
    },
    failure::Failure,
    model::Located,
};

/// For both ends to be told. Far below the time that one waits for the other to come (10 s).
const BOUND: Duration = Duration::from_secs(5);
/// Pages of each pool of a node that has no engine.
const PAGES: u32 = 16;

/// A decode side that does not fit.
pub(super) struct Misfit {
    what: &'static str,
    /// What both ends have to name.
    axis: &'static str,
    side: Side,
}

enum Side {
    Instance(InstanceClient),
    /// No instance can be started so; this one only says that it is.
    Node(Arc<Node>),
}

impl Misfit {
    /// Starts one of each kind, which else are as `fits` is.
    pub(super) async fn all(
        fleet: &mut Fleet,
        section: &Section,
        args: &DemoArgs,
        (layout, fits): (&LayoutSpec, &Handle),
    ) -> Result<Vec<Self>, Failure> {
        let other = if section.kv == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
        let other = LayoutSpec { kv: Some(other), ..layout.clone() };
        let (same, llama) = (Located::Embedded(section.model), Located::Embedded(Embedded::LlamaTiny));
        let dtype = fleet.decode("decode-dtype", &other, &args.engine, &same).await?;
        let model = fleet.decode("decode-model", layout, &args.engine, &llama).await?;
        let node = context_parallel(&fits.group, args)?;
        let misfit = |what, axis, side| Self { what, axis, side };
        Ok(vec![
            misfit("a decode with another element type", "dtype", Side::Instance(dtype.client)),
            misfit("a decode with another model", "`parts`", Side::Instance(model.client)),
            misfit("a decode with context parallel 2", "`context parallel`", Side::Node(node)),
        ])
    }

    /// Asks both ends for a hand-off, which has to be refused.
    pub(super) async fn refused(&self, prefill: &Handle, prompt: &Prompt) -> Result<Refused, Finding> {
        let room = mint_room().map_err(|problem| Finding::hand_off(&problem))?;
        let key = RoomKey { room, attempt: Attempt(0) };
        let asked = PrefillRequest {
            key,
            prompt: prompt.ids.clone(),
            sampling: SamplingSpec::default(),
            top_logprobs: 0,
            ignore_eos: true,
        };
        let started = Instant::now();
        let (at_decode, at_prefill) =
            tokio::join!(self.decode(key, prefill, prompt), prefill.client.prefill(&asked));
        let took = started.elapsed();
        for told in [at_decode, at_prefill.map(drop)] {
            match told {
                Ok(()) => return Err(Finding::not_refused(self.what)),
                Err(problem)
                    if problem.blame == Blame::PeerIncompatible && problem.cause.contains(self.axis) => {}
                Err(problem) => return Err(Finding::refused_otherwise(self.what, &problem)),
            }
        }
        if took > BOUND {
            let late = format!("both ends were told only after {:.1} s", took.as_secs_f64());
            return Err(Finding::refused_otherwise(self.what, &late));
        }
        Ok(Refused { what: self.what.into(), seconds: took.as_secs_f64() })
    }

    async fn decode(&self, key: RoomKey, prefill: &Handle, prompt: &Prompt) -> Result<(), Problem> {
        match &self.side {
            Side::Instance(client) => {
                let mut stream = client
                    .decode(&DecodeRequest {
                        key,
                        prefill: prefill.group.instance.clone(),
                        prompt: prompt.ids.clone(),
                        max_tokens: 1,
                        sampling: SamplingSpec::default(),
                        top_logprobs: 0,
                        ignore_eos: true,
                        hold: false,
                    })
                    .await?;
                while let Some(record) = stream.next().await? {
                    if let DecodeRecord::Error(problem) = record {
                        return Err(problem);
                    }
                }
                Ok(())
            }
            Side::Node(node) => {
                let members = prefill.group.members.iter();
                let address = members.map(|member| PeerAddr {
                    instance: member.instance.clone(),
                    incarnation: member.incarnation,
                    endpoint: member.control.clone(),
                });
                let receiving = node.receive(Receive {
                    key,
                    peers: address.collect(),
                    table: PageTable::identity(PAGES),
                    slot: Some(SlotId(0)),
                    tokens: TokenRange::new(0, prompt.ids.len() as u64),
                    prompt: Some(Digest::of(&prompt.ids)),
                    transport: None,
                });
                let ended = receiving.outcome().await;
                ended.map(drop).map_err(|error| Problem::new(error.blame(), Stage::HandOff, error))
            }
        }
    }
}

/// A hand-off node that says of itself what `like` does, but that its prompts are split over two ranks.
fn context_parallel(like: &Group, args: &DemoArgs) -> Result<Arc<Node>, Failure> {
    let nobody = || Failure::new(Blame::Us, "the instance to resemble is not there");
    let mut descriptor = like.members.first().ok_or_else(nobody)?.descriptor.clone();
    descriptor.placement.cp = 2;
    let (shape, placement) = (&descriptor.shape, &descriptor.placement);
    let pool = |rank| {
        let size = PoolSize { pages: PAGES, slots: 1 };
        let layout = PoolLayout::with_slots(shape, placement, RankId(rank), size);
        Ok(Arc::new(Arena::new("kvferry-misfit", layout.map_err(|e| Failure::new(Blame::Us, e))?)?))
    };
    let arenas = (0..placement.ranks()).map(pool).collect::<Result<_, Failure>>()?;
    Node::start(NodeConfig {
        instance: InstanceId("decode-cp".into()),
        incarnation: None,
        bind: "127.0.0.1:0".parse().map_err(|e| Failure::new(Blame::Us, e))?,
        descriptor,
        hosts: None,
        arenas,
        transports: args.engine.transport.kinds(),
        digest: !args.engine.no_digest,
        inject: None,
        fault: None,
        limits: kvferry_node::Limits::default(),
    })
    .map_err(|error| Failure::new(error.blame(), error))
}
