//! The source's half of a push: gathers rows of units into frames.

use std::time::Instant;

use kvferry_arena::{Arena, Memory, Pieces, Side};
use kvferry_plan::{Bytes, PartDigest, UnitId};

use crate::{
    Job, Leg, LegReport, TransportError,
    queue::Stop,
    wire::{LegId, MAX_PAYLOAD, Units},
};

/// A frame is sent when the next unit would make it longer. It stays in the second-level cache, from which the
/// kernel copies it.
const STAGE: u64 = 512 << 10;

/// Where frames go.
pub(crate) trait Sink {
    /// Sends units.
    fn units(&mut self, leg: &LegId, units: &Units, payload: &[u8]) -> Result<(), TransportError>;
    /// Says that a leg is complete, and returns the ticket under which the target will answer; tickets ascend.
    fn end(&mut self, leg: &LegId) -> Result<u64, TransportError>;
    /// Waits until the target has answered for all legs that ended; refusals count from ticket `first` on.
    fn settle(&mut self, job: &Job, first: u64) -> Result<(), TransportError>;
}

/// Sends all legs of `job` from `arena` to `sink`.
pub(crate) fn push(
    job: &Job,
    arena: &Arena,
    sink: &mut impl Sink,
    stop: &Stop,
) -> Result<Vec<LegReport>, TransportError> {
    let started = Instant::now();
    let mut reports = Vec::with_capacity(job.legs.len());
    let mut stage = Stage::default();
    let mut first = None;
    for leg in &job.legs {
        let (parts, ticket) = stage.leg(job, leg, arena, sink, stop)?;
        first = first.or(Some(ticket));
        reports.push(LegReport {
            target: leg.target,
            bytes: leg.plan.bytes(),
            copies: leg.plan.copies(),
            parts,
            took: started.elapsed(),
        });
    }
    if let Some(first) = first {
        sink.settle(job, first)?;
    }
    for report in &mut reports {
        report.took = started.elapsed();
    }
    Ok(reports)
}

#[derive(Default)]
struct Stage {
    bytes: Vec<u8>,
}

impl Stage {
    fn leg(
        &mut self,
        job: &Job,
        leg: &Leg,
        arena: &Arena,
        sink: &mut impl Sink,
        stop: &Stop,
    ) -> Result<(Vec<PartDigest>, u64), TransportError> {
        let id = LegId {
            key: job.key,
            generation: job.generation,
            source: job.source,
            target: leg.target,
            tokens: job.tokens,
        };
        let mut parts = Vec::new();
        let (mut first, mut count) = (0, 0);
        self.bytes.clear();
        for unit in leg.plan.units() {
            let (len, row) = (unit.bytes().0, unit.slice.len);
            if count > 0 && self.bytes.len() as u64 + len > STAGE {
                stop.check()?;
                sink.units(&id, &Units { first, count, row: 0, rows: None }, &self.bytes)?;
                (first, count) = (first + count, 0);
                self.bytes.clear();
            }
            if row.0 > MAX_PAYLOAD {
                return Err(TransportError::RowTooLong { row, frame: Bytes(MAX_PAYLOAD) });
            }
            let region = arena.region(unit.layer, unit.part)?;
            let mut hasher = job.digest.then(|| UnitId::new(job.key, leg.target, &unit).hasher());
            // A unit that does not fit goes alone, some rows at a time.
            let split = len > STAGE;
            let rows = if split { (STAGE / row.0.max(1)).max(1) } else { unit.rows() };
            let mut at = 0;
            while at < unit.rows() {
                let end = (at + rows).min(unit.rows());
                let start = self.bytes.len();
                for pieces in Pieces::of_rows(&unit, Side::Source, region, at..end) {
                    let from = self.bytes.len();
                    self.bytes.resize(from + pieces.bytes().index(), 0);
                    arena.gather(&pieces, &mut self.bytes[from..])?;
                }
                if let Some(hasher) = &mut hasher {
                    hasher.update(&self.bytes[start..]);
                }
                if split {
                    stop.check()?;
                    let units = Units { first, count: 1, row: at, rows: Some(end - at) };
                    sink.units(&id, &units, &self.bytes)?;
                    self.bytes.clear();
                }
                at = end;
            }
            if split {
                first += 1;
            } else {
                count += 1;
            }
            PartDigest::add(&mut parts, unit.part, hasher.map_or(0, |h| h.digest()), Bytes(len));
        }
        stop.check()?;
        if count > 0 {
            sink.units(&id, &Units { first, count, row: 0, rows: None }, &self.bytes)?;
        }
        Ok((parts, sink.end(&id)?))
    }
}
