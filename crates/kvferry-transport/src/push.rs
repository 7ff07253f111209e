//! The source's half of a push: gathers rows of units into frames.

use std::{ops::Range, time::Instant};

use kvferry_arena::{Arena, Memory, Pieces, Side};
use kvferry_plan::{Bytes, PartDigest, Unit, UnitHasher, UnitId};

use crate::{
    Job, Leg, LegReport, TransportError,
    queue::Stop,
    wire::{LegId, MAX_PAYLOAD, Units},
};

/// What all legs of a job together have in frames that are not sent yet; it stays near the processor, and so do the
/// source rows that the next leg reads beside those of this one.
const STAGE: u64 = 768 << 10;
/// A leg's part of it, at least.
const FRAME: u64 = 64 << 10;

/// Where frames go.
pub(crate) trait Sink {
    /// Sends units.
    fn units(&mut self, leg: &LegId, units: &Units, payload: &[u8]) -> Result<(), TransportError>;
    /// Says that a leg is complete, and returns the ticket under which the target will answer; tickets ascend.
    fn end(&mut self, leg: &LegId) -> Result<u64, TransportError>;
    /// Waits until the target has answered for all legs that ended; refusals count from ticket `first` on.
    fn settle(&mut self, job: &Job, first: u64) -> Result<(), TransportError>;
}

/// Sends all legs of `job` from `arena` to `sink`, in one sweep: a frame of each leg in turn, so that legs that read
/// the same pages come to them at the same time.
pub(crate) fn push(
    job: &Job,
    arena: &Arena,
    sink: &mut impl Sink,
    stop: &Stop,
    stages: &mut Vec<Vec<u8>>,
) -> Result<Vec<LegReport>, TransportError> {
    let started = Instant::now();
    let most = (STAGE / (job.legs.len() as u64).max(1)).max(FRAME);
    stages.resize_with(job.legs.len().max(stages.len()), Vec::new);
    let mut outs: Vec<_> =
        job.legs.iter().zip(stages).map(|(leg, stage)| Out::new(job, leg, stage, most)).collect();
    loop {
        let mut more = false;
        // Frames of one unit each would do; as many as fit save calls.
        while outs.iter().any(|out| !out.full()) {
            for out in &mut outs {
                out.gather(job, arena)?;
            }
        }
        for out in &mut outs {
            stop.check()?;
            more |= out.send(sink, job, arena, stop)?;
        }
        if !more {
            break;
        }
    }
    let mut first = None;
    let mut reports = Vec::with_capacity(outs.len());
    for out in outs {
        stop.check()?;
        let ticket = sink.end(&out.id)?;
        first = first.or(Some(ticket));
        reports.push(LegReport {
            target: out.leg.target,
            bytes: out.leg.plan.bytes(),
            copies: out.leg.plan.copies(),
            parts: out.parts,
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

/// A leg while it is sent.
struct Out<'a> {
    id: LegId,
    leg: &'a Leg,
    /// Payload of the next frame, `used` bytes: units `first .. first + count`.
    stage: &'a mut Vec<u8>,
    used: usize,
    first: u64,
    count: u64,
    most: u64,
    parts: Vec<PartDigest>,
}

impl<'a> Out<'a> {
    fn new(job: &Job, leg: &'a Leg, stage: &'a mut Vec<u8>, most: u64) -> Self {
        let id = LegId {
            key: job.key,
            generation: job.generation,
            source: job.source,
            target: leg.target,
            tokens: job.tokens,
        };
        Self { id, leg, stage, used: 0, first: 0, count: 0, most, parts: Vec::new() }
    }

    /// The next unit.
    fn next(&self) -> Option<Unit<'a>> {
        self.leg.plan.unit(self.first + self.count)
    }

    /// True when nothing more goes into this frame.
    fn full(&self) -> bool {
        self.next().is_none_or(|unit| self.used as u64 + unit.bytes().0 > self.most)
    }

    /// Adds a unit to the frame, if there is one that fits.
    fn gather(&mut self, job: &Job, arena: &Arena) -> Result<(), TransportError> {
        let Some(unit) = self.next().filter(|_| !self.full()) else { return Ok(()) };
        let start = self.used;
        self.rows(&unit, 0..unit.rows(), arena)?;
        let mut hasher = self.hasher(job, &unit);
        if let Some(hasher) = &mut hasher {
            hasher.update(&self.stage[start..self.used]);
        }
        self.count += 1;
        self.done(&unit, hasher);
        Ok(())
    }

    /// Sends the frame, or else a unit that is larger than one, some rows at a time. False when the leg has no more.
    fn send(
        &mut self,
        sink: &mut impl Sink,
        job: &Job,
        arena: &Arena,
        stop: &Stop,
    ) -> Result<bool, TransportError> {
        if self.count > 0 {
            let units = Units { first: self.first, count: self.count, row: 0, rows: None };
            sink.units(&self.id, &units, &self.stage[..self.used])?;
            (self.first, self.count, self.used) = (self.first + self.count, 0, 0);
            return Ok(self.next().is_some());
        }
        let Some(unit) = self.next() else { return Ok(false) };
        let row = unit.slice.len;
        if row.0 > MAX_PAYLOAD {
            return Err(TransportError::RowTooLong { row, frame: Bytes(MAX_PAYLOAD) });
        }
        let mut hasher = self.hasher(job, &unit);
        let (rows, mut at) = ((self.most / row.0.max(1)).max(1), 0);
        while at < unit.rows() {
            stop.check()?;
            let end = (at + rows).min(unit.rows());
            self.rows(&unit, at..end, arena)?;
            let payload = &self.stage[..self.used];
            if let Some(hasher) = &mut hasher {
                hasher.update(payload);
            }
            let units = Units { first: self.first, count: 1, row: at, rows: Some(end - at) };
            sink.units(&self.id, &units, payload)?;
            (at, self.used) = (end, 0);
        }
        self.first += 1;
        self.done(&unit, hasher);
        Ok(self.next().is_some())
    }

    /// Appends rows to the payload.
    fn rows(&mut self, unit: &Unit<'_>, rows: Range<u64>, arena: &Arena) -> Result<(), TransportError> {
        let region = arena.region(unit.layer, unit.part)?;
        for pieces in Pieces::of_rows(unit, Side::Source, region, rows) {
            let end = self.used + pieces.bytes().index();
            if self.stage.len() < end {
                self.stage.resize(end, 0);
            }
            arena.gather(&pieces, &mut self.stage[self.used..end])?;
            self.used = end;
        }
        Ok(())
    }

    fn hasher(&self, job: &Job, unit: &Unit<'_>) -> Option<UnitHasher> {
        job.digest.then(|| UnitId::new(job.key, self.leg.target, unit).hasher())
    }

    fn done(&mut self, unit: &Unit<'_>, hasher: Option<UnitHasher>) {
        let sum = hasher.map_or(0, |hasher| hasher.digest());
        PartDigest::add(&mut self.parts, unit.part, sum, unit.bytes());
    }
}
