//! Deliberate faults, to prove that the checks above find them.

use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::{Arc, Mutex},
};

use kvferry_arena::{Arena, ArenaError, Memory, Pieces, Side};
use kvferry_plan::{Bytes, Part, RankId, Unit};

use crate::{
    TransportError,
    local::lock,
    stats::{Counters, add},
};

/// A fault that a target commits once per room while bytes land: below its digest, which covers the place where the
/// bytes should be. Reports claim the bytes as moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// One row is not written.
    DropRow,
    /// One bit is inverted.
    FlipByte,
    /// The bytes of one unit are not written.
    SkipSend,
    /// The bytes of two target ranks are exchanged, where there are several; else those of two source ranks.
    SwapRank,
    /// As [`Self::SwapRank`], of per-request state only.
    SwapState,
    /// One row goes to another target rank than its own: over a row of that rank, and not to where it belongs.
    MisrouteRow,
}

impl Inject {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::DropRow, Self::FlipByte, Self::SkipSend, Self::SwapRank, Self::SwapState, Self::MisrouteRow];
}

impl fmt::Display for Inject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DropRow => "drop-row",
            Self::FlipByte => "flip-byte",
            Self::SkipSend => "skip-send",
            Self::SwapRank => "swap-rank",
            Self::SwapState => "swap-state",
            Self::MisrouteRow => "misroute-row",
        })
    }
}

impl FromStr for Inject {
    type Err = String;

    /// ```
    /// use kvferry_transport::Inject;
    /// assert_eq!("drop-row".parse(), Ok(Inject::DropRow));
    /// assert!("drop".parse::<Inject>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|fault| fault.to_string() == text).ok_or_else(|| {
            let names = Self::ALL.map(|fault| format!("`{fault}`")).join(", ");
            format!("`{text}` is not a fault; faults are {names}")
        })
    }
}

/// Places of earlier legs that are remembered to find two whose bytes differ.
const SEEN: usize = 64;

/// Where the rows of one unit are written.
#[derive(Clone, Debug)]
pub(crate) struct Spot {
    source: RankId,
    target: RankId,
    part: Part,
    arena: Arc<Arena>,
    rows: Vec<Bytes>,
    row_bytes: usize,
}

impl Spot {
    pub(crate) fn new(
        source: RankId,
        target: RankId,
        arena: &Arc<Arena>,
        unit: &Unit<'_>,
        rows: Range<u64>,
    ) -> Result<Self, ArenaError> {
        let region = arena.region(unit.layer, unit.part)?;
        let len = unit.slice.len;
        // Pieces may be several rows that touch; faults are about single rows.
        let rows = Pieces::of_rows(unit, Side::Target, region, rows)
            .flat_map(|pieces| {
                let rows = pieces.len.0.checked_div(len.0).unwrap_or(0);
                pieces.offsets().flat_map(move |at| (0..rows).map(move |i| Bytes(at.0 + i * len.0)))
            })
            .collect();
        Ok(Self { source, target, part: unit.part, arena: Arc::clone(arena), rows, row_bytes: len.index() })
    }

    fn read(&self, at: Bytes) -> Result<Vec<u8>, ArenaError> {
        let mut bytes = vec![0; self.row_bytes];
        self.arena.read(at, &mut bytes)?;
        Ok(bytes)
    }

    fn snapshot(&self) -> Result<Vec<Vec<u8>>, ArenaError> {
        self.rows.iter().map(|at| self.read(*at)).collect()
    }

    /// Puts the bytes from before back, of one row or of all, if that changes anything.
    fn undo(&self, before: &[Vec<u8>], one: bool) -> Result<bool, ArenaError> {
        let mut changed = false;
        for (at, old) in self.rows.iter().zip(before) {
            if self.read(*at)? != *old {
                self.arena.write(*at, old)?;
                changed = true;
                if one {
                    break;
                }
            }
        }
        Ok(changed)
    }

    /// Inverts the sign of the last element of the first row: a change of value that leaves no model's range, so that
    /// with digests off it gets as far as the comparison.
    fn flip(&self) -> Result<bool, ArenaError> {
        let Some(at) = self.rows.first() else { return Ok(false) };
        let mut bytes = self.read(*at)?;
        let Some(last) = bytes.last_mut() else { return Ok(false) };
        *last ^= 0x80;
        self.arena.write(*at, &bytes)?;
        Ok(true)
    }

    /// Exchanges bytes with `other`, as many as both have, if that changes anything.
    fn exchange(&self, other: &Self) -> Result<bool, ArenaError> {
        let len = self.row_bytes.min(other.row_bytes);
        let mut changed = false;
        for (here, there) in self.rows.iter().zip(&other.rows) {
            let (mut mine, mut theirs) = (self.read(*here)?, other.read(*there)?);
            mine.truncate(len);
            theirs.truncate(len);
            if mine != theirs {
                self.arena.write(*here, &theirs)?;
                other.arena.write(*there, &mine)?;
                changed = true;
            }
        }
        Ok(changed)
    }

    /// Moves the first row that may be to where `other`, of another rank, has one: `other` loses its row, and here the
    /// bytes are those from `before`.
    fn misroute(&self, before: &[Vec<u8>], other: &Self) -> Result<bool, ArenaError> {
        if self.part.is_state() || (self.part, self.row_bytes) != (other.part, other.row_bytes) {
            return Ok(false);
        }
        for ((here, there), old) in self.rows.iter().zip(&other.rows).zip(before) {
            let row = self.read(*here)?;
            if row != *old && row != other.read(*there)? {
                self.arena.write(*here, old)?;
                other.arena.write(*there, &row)?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The fault of one room.
#[derive(Debug)]
pub(crate) struct Faults {
    inject: Inject,
    several_targets: bool,
    /// Places written before; `None` once the fault is committed.
    seen: Mutex<Option<Vec<Spot>>>,
}

impl Faults {
    pub(crate) fn new(inject: Inject, several_targets: bool) -> Self {
        Self { inject, several_targets, seen: Mutex::new(Some(Vec::new())) }
    }

    pub(crate) fn pending(&self) -> bool {
        lock(&self.seen).is_some()
    }

    /// Calls `write`, which writes all of `spots`, and commits the fault if this is a place where it changes bytes.
    pub(crate) fn around(
        &self,
        spots: &[Spot],
        write: impl FnOnce() -> Result<(), TransportError>,
        counters: &Counters,
    ) -> Result<(), TransportError> {
        let mut state = lock(&self.seen);
        let Some(seen) = state.as_mut() else { return write() };
        let before = match self.inject {
            Inject::DropRow | Inject::SkipSend | Inject::MisrouteRow => {
                spots.iter().map(Spot::snapshot).collect::<Result<Vec<_>, _>>()?
            }
            Inject::FlipByte | Inject::SwapRank | Inject::SwapState => Vec::new(),
        };
        write()?;
        let mut committed = false;
        for (i, spot) in spots.iter().enumerate() {
            let old = before.get(i).map(Vec::as_slice).unwrap_or_default();
            committed = match self.inject {
                Inject::DropRow => spot.undo(old, true)?,
                Inject::FlipByte => spot.flip()?,
                Inject::SkipSend => spot.undo(old, false)?,
                Inject::SwapState if !spot.part.is_state() => false,
                Inject::SwapRank | Inject::SwapState => self.with_another(spot, seen, Spot::exchange)?,
                Inject::MisrouteRow if !self.several_targets => false,
                Inject::MisrouteRow => {
                    self.with_another(spot, seen, |spot, other| spot.misroute(old, other))?
                }
            };
            if committed {
                break;
            }
        }
        if committed {
            *state = None;
            add(&counters.faults, 1);
        }
        Ok(())
    }

    /// Does `harm` to a place and an earlier one of another rank, if there is one that it changes.
    fn with_another(
        &self,
        spot: &Spot,
        seen: &mut Vec<Spot>,
        harm: impl Fn(&Spot, &Spot) -> Result<bool, ArenaError>,
    ) -> Result<bool, ArenaError> {
        let others = seen.iter().filter(|other| {
            if self.several_targets { other.target != spot.target } else { other.source != spot.source }
        });
        for other in others {
            if harm(spot, other)? {
                return Ok(true);
            }
        }
        if seen.len() < SEEN {
            seen.push(spot.clone());
        }
        Ok(false)
    }
}
