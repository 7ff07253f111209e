//! A request's cache in coordinates: what comparisons, debug pages and reference copies read. Point queries only,
//! no plan.

use std::{collections::HashMap, ops::Range, sync::Arc};

use kvferry_arena::{Arena, Memory};
use kvferry_plan::{
    Bytes, CacheShape, Cast, Dtype, Generation, HeadId, LayerId, PageId, PageTable, Part, PartShape,
    Placement, RankId, RoomKey, SlotId, Token,
};
use serde::Serialize;

use crate::{EngineError, pages::Lease};

/// The name of a piece of cache content: one token of one head. Of per-request state, one row of its window stands in
/// the place of a token, and heads are counted over all channel groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinate {
    /// The layer.
    pub layer: LayerId,
    /// The part.
    pub part: Part,
    /// The head, 0 for latent rows.
    pub head: HeadId,
    /// The token, or the row of the state.
    pub token: Token,
}

/// Casts the elements of a piece.
pub(crate) type Convert<'a> = &'a dyn Fn(Cast, &[u8]) -> Vec<u8>;

/// The cache of one request's prompt in one engine, as long as the request is not released. Its state is that after the
/// prompt if the request was told to be held ([`crate::Request::hold`]); else that after the last token that was computed,
/// which may be one of the answer.
#[derive(Clone, Debug)]
pub struct Rows {
    key: RoomKey,
    model: Arc<str>,
    shape: Arc<CacheShape>,
    placement: Arc<Placement>,
    arenas: Vec<Arc<Arena>>,
    table: PageTable,
    generations: Vec<Generation>,
    slot: Option<(SlotId, Generation)>,
    prompt: u64,
    /// Tokens that the state has taken in.
    filled: u64,
    /// In the place of what lies in the slot now.
    kept: Option<Arc<PromptState>>,
}

/// A copy of a request's state as it was after its prompt, by rank.
#[derive(Debug)]
pub(crate) struct PromptState(HashMap<(RankId, Coordinate), Vec<u8>>);

/// What a [`RankRows`] holds of one part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartRows {
    /// The part.
    pub part: Part,
    /// The rank's layers that have it, ascending.
    pub layers: Vec<LayerId>,
    /// Heads, of the whole model's: one run, or of per-request state one in each channel group.
    pub heads: Vec<Range<u32>>,
    /// Elements of one head of one token.
    pub head_elems: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Tokens that the rank holds, or the rows of the state, ascending.
    pub tokens: Vec<Token>,
}

/// Everything that one rank holds of a request's prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankRows {
    /// The rank.
    pub rank: RankId,
    /// Its layers, ascending.
    pub layers: Vec<LayerId>,
    /// Its parts.
    pub parts: Vec<PartRows>,
    /// The bytes, in the order layer, part, token, head, element.
    #[serde(skip)]
    pub bytes: Vec<u8>,
}

impl Rows {
    pub(crate) fn new(
        key: RoomKey,
        model: &str,
        (shape, placement): (&CacheShape, &Placement),
        arenas: Vec<Arc<Arena>>,
        lease: &Lease,
        (prompt, filled): (u64, u64),
    ) -> Result<Self, EngineError> {
        let table = lease.table().clone();
        let slot = lease.slot().zip(arenas.first());
        let slot = slot.map(|(slot, arena)| Ok::<_, EngineError>((slot, arena.slot_generation(slot)?)));
        let owners = owners(placement, &arenas);
        let generation = |page: &PageId| generation(placement, &owners, *page);
        let generations = table.0.iter().map(generation).collect::<Result<_, _>>()?;
        Ok(Self {
            key,
            model: model.into(),
            shape: Arc::new(shape.clone()),
            placement: Arc::new(placement.clone()),
            arenas,
            table,
            generations,
            slot: slot.transpose()?,
            prompt,
            filled,
            kept: None,
        })
    }

    /// The same with the state that was kept.
    pub(crate) fn with_state(self, kept: Arc<PromptState>) -> Self {
        Self { kept: Some(kept), filled: self.prompt, ..self }
    }

    /// Copies the state as it is now.
    pub(crate) fn copy_state(&self) -> Result<PromptState, EngineError> {
        let mut copy = HashMap::new();
        for at in self.coordinates().filter(|at| at.part.is_state()) {
            for rank in self.ranks() {
                if let Some(bytes) = self.bytes_on(rank, at)? {
                    copy.insert((rank, at), bytes);
                }
            }
        }
        Ok(PromptState(copy))
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt
    }

    /// Rows of a part: the prompt's tokens, or those of its state.
    fn tokens(&self, part: &PartShape) -> u64 {
        part.state.as_ref().map_or(self.prompt, |state| state.window.into())
    }

    /// Every coordinate of the prompt, in the order layer, part, token, head.
    pub fn coordinates(&self) -> impl Iterator<Item = Coordinate> + '_ {
        let mut layers: Vec<LayerId> = self.shape.parts.iter().flat_map(|part| part.layers.clone()).collect();
        layers.sort_unstable();
        layers.dedup();
        layers.into_iter().flat_map(move |layer| {
            self.shape.parts.iter().filter(move |part| part.layers.contains(&layer)).flat_map(move |part| {
                (0..self.tokens(part)).flat_map(move |token| {
                    (0..part.heads).map(move |head| Coordinate {
                        layer,
                        part: part.part,
                        head: HeadId(head),
                        token: Token(token),
                    })
                })
            })
        })
    }

    /// The bytes of a coordinate as `rank` holds them; `None` when it does not hold it.
    ///
    /// # Errors
    /// [`EngineError::UnknownRoom`] when the request was released.
    pub fn bytes_on(&self, rank: RankId, at: Coordinate) -> Result<Option<Vec<u8>>, EngineError> {
        let Some((offset, len)) = self.locate(rank, at) else { return Ok(None) };
        if let Some(PromptState(kept)) = self.kept.as_deref().filter(|_| at.part.is_state()) {
            return Ok(kept.get(&(rank, at)).cloned());
        }
        let mut bytes = vec![0; len];
        self.arena(rank)?.read(offset, &mut bytes)?;
        self.alive()?;
        Ok(Some(bytes))
    }

    /// The bytes of a coordinate, from the first rank that holds it; `None` for one that is not of this prompt.
    ///
    /// # Errors
    /// As [`Rows::bytes_on`].
    pub fn bytes(&self, at: Coordinate) -> Result<Option<Vec<u8>>, EngineError> {
        for rank in self.ranks() {
            if let Some(bytes) = self.bytes_on(rank, at)? {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    /// Everything that `rank` holds.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a rank that does not exist; [`EngineError::UnknownRoom`] when the request was
    /// released.
    pub fn rank(&self, rank: RankId) -> Result<RankRows, EngineError> {
        self.arena(rank)?;
        let mut layers: Vec<LayerId> =
            self.shape.parts.iter().flat_map(|part| self.placement.layers(part, rank)).collect();
        layers.sort_unstable();
        layers.dedup();
        let parts: Vec<PartRows> =
            self.shape.parts.iter().filter_map(|part| self.part_rows(part, rank)).collect();
        let mut bytes = Vec::new();
        for layer in &layers {
            for part in parts.iter().filter(|part| part.layers.contains(layer)) {
                for token in &part.tokens {
                    for head in part.heads.iter().flat_map(Clone::clone) {
                        let at =
                            Coordinate { layer: *layer, part: part.part, head: HeadId(head), token: *token };
                        bytes.extend(self.bytes_on(rank, at)?.unwrap_or_default());
                    }
                }
            }
        }
        Ok(RankRows { rank, layers, parts, bytes })
    }

    /// Writes the content of `from` over this prompt's cache, coordinate by coordinate, on every rank; the first `cached`
    /// tokens are there. Element types may differ if there is a `convert`.
    pub(crate) fn fill_from(
        &self,
        from: &Self,
        cached: u64,
        convert: Option<Convert<'_>>,
    ) -> Result<(), EngineError> {
        let refuse = |reason: String| Err(EngineError::RoomState { key: self.key, reason });
        if self.prompt != from.prompt {
            return refuse(format!("it was reserved for {} tokens, not for {}", self.prompt, from.prompt));
        }
        if self.model != from.model || self.shape != from.shape {
            return refuse(format!("the model here is {}, there {}", self.model, from.model));
        }
        if from.slot.is_some() && from.filled != from.prompt {
            return refuse(format!("the state there is after {} tokens, not after the prompt", from.filled));
        }
        let dtype = |side: &Placement, part| side.part(part).map(|layout| layout.dtype);
        let cast = |part| Cast::between(dtype(&from.placement, part)?, dtype(&self.placement, part)?);
        if let Some(part) = self.placement.parts.iter().find(|p| convert.is_none() && cast(p.part).is_some())
        {
            return refuse(format!("the element type of `{}` differs", part.part));
        }
        for at in from.coordinates().filter(|at| at.part.is_state() || at.token.0 >= cached) {
            let Some(mut bytes) = from.bytes(at)? else {
                return refuse(format!("nobody holds {at:?}"));
            };
            if let (Some(convert), Some(cast)) = (convert, cast(at.part)) {
                bytes = convert(cast, &bytes);
            }
            for rank in self.ranks() {
                match self.locate(rank, at) {
                    Some((offset, len)) if len == bytes.len() => self.arena(rank)?.write(offset, &bytes)?,
                    Some((_, len)) => {
                        return refuse(format!("{} bytes for the {len} of {at:?}", bytes.len()));
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }

    fn ranks(&self) -> impl Iterator<Item = RankId> + use<> {
        (0..self.placement.ranks()).map(RankId)
    }

    fn arena(&self, rank: RankId) -> Result<&Arc<Arena>, EngineError> {
        self.arenas.get(rank.index()).ok_or_else(|| {
            EngineError::Request(format!("there is no rank {rank}; ranks are 0 to {}", self.arenas.len() - 1))
        })
    }

    /// Where `rank` keeps a coordinate, and its length.
    fn locate(&self, rank: RankId, at: Coordinate) -> Option<(Bytes, usize)> {
        let shape = self.shape.part(at.part)?;
        let layout = self.placement.part(at.part)?;
        if at.token.0 >= self.tokens(shape) {
            return None;
        }
        // Heads of a row lie one after the other, those of the next channel group behind them.
        let mut head = 0;
        let mut found = None;
        for share in self.placement.shares(shape, rank) {
            if share.contains(&at.head.0) {
                found = Some(head + u64::from(at.head.0 - share.start));
            }
            head += share.len() as u64;
        }
        let row = match self.slot {
            Some((slot, _)) if at.part.is_state() => kvferry_plan::Row(layout.slot_row(slot).0 + at.token.0),
            _ => layout.row(self.placement.class(at.part, rank), &self.table, at.token)?,
        };
        let region = self.arenas.get(rank.index())?.layout().region(at.layer, at.part)?;
        let len = u64::from(shape.head_elems) * layout.dtype.size().0;
        let offset = Bytes(region.row_offset(row)?.0 + found? * len);
        Some((offset, usize::try_from(len).ok()?))
    }

    fn part_rows(&self, shape: &PartShape, rank: RankId) -> Option<PartRows> {
        let layout = self.placement.part(shape.part)?;
        let class = self.placement.class(shape.part, rank);
        let held = |token: &Token| shape.state.is_some() || layout.row(class, &self.table, *token).is_some();
        Some(PartRows {
            part: shape.part,
            layers: self.placement.layers(shape, rank),
            heads: self.placement.shares(shape, rank).collect(),
            head_elems: shape.head_elems,
            dtype: layout.dtype,
            tokens: (0..self.tokens(shape)).map(Token).filter(held).collect(),
        })
    }

    /// A page or slot that has changed its owner since holds another request's rows.
    fn alive(&self) -> Result<(), EngineError> {
        let Some(arena) = self.arenas.first() else { return Ok(()) };
        let owners = owners(&self.placement, &self.arenas);
        for (page, then) in self.table.0.iter().zip(&self.generations) {
            if generation(&self.placement, &owners, *page)? != *then {
                return Err(EngineError::UnknownRoom(self.key));
            }
        }
        match self.slot {
            Some((slot, then)) if arena.slot_generation(slot)? != then => {
                Err(EngineError::UnknownRoom(self.key))
            }
            _ => Ok(()),
        }
    }
}

/// By shard rank an arena of it; without KV sharding that of any rank, where all pages are.
fn owners<'a>(placement: &Placement, arenas: &'a [Arc<Arena>]) -> Vec<&'a Arena> {
    let of = |owner| (0..).map(RankId).zip(arenas).find(|(rank, _)| placement.shard_rank(*rank) == owner);
    let owners = (0..placement.shard_ranks()).map(of);
    owners.map_while(|found| found.map(|(_, arena)| &**arena)).collect()
}

/// The generation of a page where it is kept.
fn generation(placement: &Placement, owners: &[&Arena], page: PageId) -> Result<Generation, EngineError> {
    let lost = || EngineError::Pool(format!("page {page} is no rank's"));
    let owner = owners.get(placement.owner(page) as usize).ok_or_else(lost)?;
    Ok(owner.generation(placement.local_page(page))?)
}
