//! A prompt across two processes: the demo plays the router.

use std::time::{Duration, Instant};

use kvferry_plan::{Attempt, Blame, RankId, RoomKey};
use kvferry_server::{
    Chosen, DecodeDone, DecodeRequest, InstancePair, KvDump, PairDone, PairEvent, PrefillReply, Problem,
    SamplingSpec, Stage, mint_room,
};

use super::{cluster::Handle, prompts::Prompt};
use crate::args::{DemoArgs, InjectArg};

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
    /// The fault that was asked for, when nothing that was sent or landed could be changed by it.
    pub(super) missed: Option<InjectArg>,
}

/// Hands one prompt over from `prefill` to `decode`; `on_token` is told of each token as it comes.
pub(super) async fn run(
    (prefill, decode): (&Handle, &Handle),
    prompt: &Prompt,
    args: &DemoArgs,
    mut on_token: impl FnMut(u32),
) -> Result<Run, Problem> {
    let key = RoomKey { room: mint_room()?, attempt: Attempt(0) };
    let request = DecodeRequest {
        key,
        prefill: prefill.group.instance.clone(),
        prompt: prompt.ids.clone(),
        max_tokens: args.max_tokens,
        sampling: SamplingSpec::default(),
        top_logprobs: 0,
        ignore_eos: args.ignore_eos,
        hold: true,
    };
    // Who commits it, and says so.
    let on_the_way = args.engine.inject.and_then(|fault| {
        let at = if fault.at_source().is_some() { prefill } else { decode };
        (fault.in_arithmetic().is_none()).then_some((fault, at))
    });
    let committed = match on_the_way {
        Some((_, at)) => faults(at).await?,
        None => 0,
    };
    let pair = InstancePair { prefill: prefill.leg(), decode: decode.leg() };
    let started = Instant::now();
    let mut answer = pair.open(request).await?;
    let (mut tokens, mut first, mut ended) = (Vec::new(), None, None);
    while let Some(event) = answer.next().await? {
        match event {
            PairEvent::Token(token) => {
                first.get_or_insert_with(|| started.elapsed());
                on_token(token.id);
                tokens.push(token);
            }
            PairEvent::Done(done) => ended = Some((done, started.elapsed())),
        }
    }
    let (PairDone { decode: done, prefill: Some(reply) }, last) = ended.ok_or_else(unfinished)? else {
        return Err(unfinished());
    };
    let mut cache = Vec::new();
    for rank in 0..decode.group.ranks {
        cache.push(decode.client.kv(key, RankId(rank)).await?);
    }
    decode.client.release(key).await?;
    let missed = match on_the_way {
        Some((fault, at)) if faults(at).await? == committed => Some(fault),
        _ => None,
    };
    Ok(Run { tokens, first: first.unwrap_or(last), last, prefill: reply, decode: done, cache, missed })
}

fn unfinished() -> Problem {
    let cause = "decode has answered, but prefill does not say how it went";
    Problem::new(Blame::PeerMisbehaved, Stage::HandOff, cause)
}

/// Faults that an instance has committed on purpose since its start.
async fn faults(instance: &Handle) -> Result<u64, Problem> {
    let ledger = instance.client.ledger().await?;
    ledger.pointer("/node/faults").and_then(serde_json::Value::as_u64).ok_or_else(|| {
        Problem::new(
            Blame::PeerMisbehaved,
            Stage::Request,
            "an instance does not say how many faults it committed",
        )
    })
}
