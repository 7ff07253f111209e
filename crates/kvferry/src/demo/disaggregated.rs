//! A prompt across two processes: the demo plays the router.

use std::time::{Duration, Instant};

use kvferry_plan::{Attempt, Blame, RankId, RoomId, RoomKey};
use kvferry_server::{
    Chosen, DecodeDone, DecodeRecord, DecodeRequest, KvDump, PrefillReply, PrefillRequest, Problem,
    SamplingSpec, Stage,
};
use tokio::time::timeout;

use super::{cluster::Cluster, prompts::Prompt};
use crate::args::{DemoArgs, InjectArg};

/// How long the other side may take to say what it knows after one side has failed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What came of it.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) tokens: Vec<Chosen>,
    /// From the request to the first token, and to the last.
    pub(super) first: Duration,
    pub(super) last: Duration,
    pub(super) prefill: PrefillReply,
    pub(super) decode: DecodeDone,
    /// The prompt's cache on every decode rank.
    pub(super) cache: Vec<KvDump>,
    /// The fault that was asked for, when nothing that landed could be changed by it.
    pub(super) missed: Option<InjectArg>,
}

struct Decoded {
    tokens: Vec<Chosen>,
    first: Duration,
    last: Duration,
    done: DecodeDone,
}

/// Hands one prompt over; `on_token` is told of each token as it comes.
pub(super) async fn run(
    cluster: &Cluster,
    prompt: &Prompt,
    args: &DemoArgs,
    on_token: impl FnMut(u32),
) -> Result<Run, Problem> {
    let key = RoomKey { room: mint()?, attempt: Attempt(0) };
    let to_prefill = PrefillRequest {
        key,
        prompt: prompt.ids.clone(),
        sampling: SamplingSpec::default(),
        top_logprobs: 0,
    };
    let to_decode = DecodeRequest {
        key,
        prefill: cluster.prefill.group.instance.clone(),
        prompt: prompt.ids.clone(),
        max_tokens: args.max_tokens,
        sampling: SamplingSpec::default(),
        top_logprobs: 0,
        ignore_eos: args.ignore_eos,
        hold: true,
    };
    let committed = match args.engine.inject {
        Some(_) => faults(cluster).await?,
        None => 0,
    };
    let (prefill, decoded) =
        both(cluster.prefill.client.prefill(&to_prefill), decode(cluster, &to_decode, on_token)).await?;
    let mut cache = Vec::new();
    for rank in 0..cluster.decode.group.ranks {
        cache.push(cluster.decode.client.kv(key, RankId(rank)).await?);
    }
    cluster.decode.client.release(key).await?;
    let missed = match args.engine.inject {
        Some(fault) if faults(cluster).await? == committed => Some(fault),
        _ => None,
    };
    let Decoded { tokens, first, last, done } = decoded;
    Ok(Run { tokens, first, last, prefill, decode: done, cache, missed })
}

/// Both results; or the more telling of the failures. Dropping a side's future ends the room on that side.
async fn both<A, B>(
    prefill: impl Future<Output = Result<A, Problem>>,
    decode: impl Future<Output = Result<B, Problem>>,
) -> Result<(A, B), Problem> {
    tokio::pin!(prefill, decode);
    tokio::select! {
        a = &mut prefill => match a {
            Ok(a) => decode.await.map(|b| (a, b)),
            // Nothing was begun: decode has nothing to add.
            Err(problem) if problem.stage == Stage::Admission => Err(problem),
            // Decode decides whether it has its bytes, so its words come first.
            Err(problem) => match timeout(LAST_WORDS, decode).await {
                Ok(Err(better)) if better.blame != Blame::Caller => Err(better),
                _ => Err(problem),
            },
        },
        b = &mut decode => match b {
            Ok(b) => prefill.await.map(|a| (a, b)),
            Err(problem) => {
                if problem.stage != Stage::Admission {
                    let _ = timeout(LAST_WORDS, prefill).await;
                }
                Err(problem)
            }
        },
    }
}

async fn decode(
    cluster: &Cluster,
    request: &DecodeRequest,
    mut on_token: impl FnMut(u32),
) -> Result<Decoded, Problem> {
    let started = Instant::now();
    let mut stream = cluster.decode.client.decode(request).await?;
    let (mut tokens, mut first) = (Vec::new(), None);
    while let Some(record) = stream.next().await? {
        match record {
            DecodeRecord::Token(token) => {
                first.get_or_insert_with(|| started.elapsed());
                on_token(token.id);
                tokens.push(token);
            }
            DecodeRecord::Done(done) => {
                let last = started.elapsed();
                return Ok(Decoded { tokens, first: first.unwrap_or(last), last, done });
            }
            DecodeRecord::Error(problem) => return Err(problem),
        }
    }
    Err(Problem::new(Blame::PeerMisbehaved, Stage::Compute, "the decode stream ended without an end"))
}

/// A room id that nobody can guess or meet twice.
fn mint() -> Result<RoomId, Problem> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| {
        Problem::new(Blame::Environment, Stage::Request, format!("no randomness for a room id: {e}"))
    })?;
    Ok(RoomId(u128::from_ne_bytes(id)))
}

/// Faults that decode has committed on purpose since its start.
async fn faults(cluster: &Cluster) -> Result<u64, Problem> {
    let ledger = cluster.decode.client.ledger().await?;
    ledger.pointer("/node/faults").and_then(serde_json::Value::as_u64).ok_or_else(|| {
        Problem::new(
            Blame::PeerMisbehaved,
            Stage::Request,
            "decode does not say how many faults it committed",
        )
    })
}
