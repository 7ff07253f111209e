//! The answer for programs. docs/plan.md describes the fields.

use kvferry_plan::{Cast, Dtype, LayerId, Part, RankId, Row, Run, Token, TokenRange, Unsupported};
use serde::Serialize;

use super::answer::{Answer, Cost, Move};
use super::request::Request;
use crate::failure::Failure;
use kvferry_plan::Blame;

#[derive(Serialize)]
struct Document<'a> {
    supported: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    axis: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    model_shape: &'a str,
    prefill: &'a str,
    decode: &'a str,
    tokens: TokenRange,
    #[serde(flatten)]
    total: Option<Costs>,
    /// What prefill converts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conversions: Vec<CastOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pairs: Option<Vec<PairOut>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<RowOut>>,
}

#[derive(Serialize)]
struct Costs {
    bytes: u64,
    runs: u64,
    copies: u64,
    flat_descriptors: u64,
}

impl From<Cost> for Costs {
    fn from(cost: Cost) -> Self {
        Self { bytes: cost.bytes, runs: cost.runs, copies: cost.copies, flat_descriptors: cost.flat }
    }
}

#[derive(Serialize)]
struct CastOut {
    part: Part,
    from: Dtype,
    to: Dtype,
    /// Every number stays what it is.
    exact: bool,
}

#[derive(Serialize)]
struct PairOut {
    prefill_rank: RankId,
    decode_rank: RankId,
    #[serde(flatten)]
    cost: Costs,
    groups: Vec<GroupOut>,
}

/// Layers of a part (of state: of one channel group) that move the same rows.
#[derive(Serialize)]
struct GroupOut {
    part: Part,
    #[serde(skip_serializing_if = "Option::is_none")]
    channels: Option<u32>,
    layers: Vec<LayerId>,
    src_offset: u64,
    dst_offset: u64,
    /// Bytes of a row at prefill, where decode has it in another element type.
    #[serde(skip_serializing_if = "Option::is_none")]
    src_len: Option<u64>,
    len: u64,
    runs: Vec<RunOut>,
}

#[derive(Serialize)]
struct RunOut {
    token: Token,
    token_step: u64,
    src_row: Row,
    src_step: u64,
    dst_row: Row,
    dst_step: u64,
    block: u64,
    blocks: u64,
}

#[derive(Serialize)]
struct RowOut {
    part: Part,
    layer: LayerId,
    prefill_rank: RankId,
    prefill_row: Row,
    decode_rank: RankId,
    decode_row: Row,
    token: Token,
}

pub(super) fn refusal(request: &Request, refusal: &Unsupported) -> Result<String, Failure> {
    let axis = Some(refusal.axis.to_string());
    print(&Document { axis, reason: Some(&refusal.reason), ..blank(request, false) })
}

pub(super) fn answer(request: &Request, answer: &Answer, rows: bool) -> Result<String, Failure> {
    let rows = rows.then(|| answer.moves.iter().flat_map(rows_of).collect());
    let pairs = Some(answer.moves.iter().map(pair).collect());
    let total = Some(answer.total().into());
    let cast =
        |(part, cast): (Part, Cast)| CastOut { part, from: cast.from(), to: cast.to(), exact: cast.exact() };
    let conversions = answer.pair.casts().map(cast).collect();
    print(&Document { total, conversions, pairs, rows, ..blank(request, true) })
}

fn blank(request: &Request, supported: bool) -> Document<'_> {
    Document {
        supported,
        axis: None,
        reason: None,
        model_shape: &request.model,
        prefill: &request.prefill.label,
        decode: &request.decode.label,
        tokens: request.tokens,
        total: None,
        conversions: Vec::new(),
        pairs: None,
        rows: None,
    }
}

pub(super) fn print(document: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(document).map_err(|e| Failure::new(Blame::Us, e))?;
    Ok(text + "\n")
}

fn pair(m: &Move) -> PairOut {
    let groups = m.plans.iter().flat_map(|plan| {
        plan.groups().iter().map(|group| GroupOut {
            part: group.part,
            channels: group.part.is_state().then_some(group.channels),
            layers: group.layers.clone(),
            src_offset: group.slice.src_offset.0,
            dst_offset: group.slice.dst_offset.0,
            src_len: group.slice.cast.map(|_| group.slice.src_len().0),
            len: group.slice.len.0,
            runs: plan.group_runs(group).iter().map(run).collect(),
        })
    });
    PairOut { prefill_rank: m.src, decode_rank: m.dst, cost: m.cost.into(), groups: groups.collect() }
}

fn run(run: &Run) -> RunOut {
    RunOut {
        token: run.token,
        token_step: run.token_step,
        src_row: run.src_row,
        src_step: run.src_step,
        dst_row: run.dst_row,
        dst_step: run.dst_step,
        block: run.block,
        blocks: run.blocks,
    }
}

fn rows_of(m: &Move) -> impl Iterator<Item = RowOut> + '_ {
    let units = m.plans.iter().flat_map(kvferry_plan::Plan::units);
    units.flat_map(move |unit| {
        let rows = unit.runs.iter().flat_map(Run::expand);
        rows.map(move |(token, src, dst)| RowOut {
            part: unit.part,
            layer: unit.layer,
            prefill_rank: m.src,
            prefill_row: src,
            decode_rank: m.dst,
            decode_row: dst,
            token,
        })
    })
}
