//! The source's half of a push: gathers rows of units into frames.

use std::time::Instant;

use kvferry_arena::{Arena, RowHasher, Side, UnitRead, read_units};
use kvferry_plan::{Bytes, PartDigest, Unit, UnitId};

use crate::{
    Job, Leg, LegReport, TransportError,
    queue::Stop,
    wire::{LegId, MAX_PAYLOAD, Units},
};

/// What all legs of a job together have in frames that are not sent yet. Smaller ones stay nearer to the processor and
/// cost more calls.
const STAGE: u64 = 1536 << 10;
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

/// Sends all legs of `job` from `arena` to `sink`, in one sweep: a unit of each leg in turn goes into its frame, so that
/// legs that read the same pages come to them at the same time.
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
        while gather(&mut outs, job, arena)? {}
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
            rotation: job.rotation,
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
            let payload = reserve(self.stage, 0, Bytes((end - at) * row.0));
            let read = UnitRead { unit, rows: at..end, into: Some(&mut *payload), hasher: hasher.as_mut() };
            read_units(arena, Side::Source, vec![read])?;
            let units = Units { first: self.first, count: 1, row: at, rows: Some(end - at) };
            sink.units(&self.id, &units, payload)?;
            at = end;
        }
        self.first += 1;
        self.done(&unit, hasher.as_ref());
        Ok(self.next().is_some())
    }

    fn hasher(&self, job: &Job, unit: &Unit<'_>) -> Option<RowHasher> {
        job.digest.then(|| RowHasher::new(UnitId::new(job.key, self.leg.target, unit), unit.bytes()))
    }

    fn done(&mut self, unit: &Unit<'_>, hasher: Option<&RowHasher>) {
        let sum = hasher.map_or(0, RowHasher::digest);
        PartDigest::add(&mut self.parts, unit.part, sum, unit.bytes());
    }
}

/// Adds a unit of each leg to its frame, where there is one that fits; false when there was none. The units are read in
/// one sweep.
fn gather(outs: &mut [Out<'_>], job: &Job, arena: &Arena) -> Result<bool, TransportError> {
    let mut units: Vec<_> = outs
        .iter()
        .map(|out| out.next().filter(|_| !out.full()).map(|unit| (unit, out.hasher(job, &unit))))
        .collect();
    let mut reads = Vec::with_capacity(units.len());
    for (out, unit) in outs.iter_mut().zip(&mut units) {
        let Some((unit, hasher)) = unit else { continue };
        let into = reserve(out.stage, out.used, unit.bytes());
        reads.push(UnitRead { unit: *unit, rows: 0..unit.rows(), into: Some(into), hasher: hasher.as_mut() });
    }
    read_units(arena, Side::Source, reads)?;
    for (out, unit) in outs.iter_mut().zip(&units) {
        let Some((unit, hasher)) = unit else { continue };
        out.used += unit.bytes().index();
        out.count += 1;
        out.done(unit, hasher.as_ref());
    }
    Ok(units.iter().any(Option::is_some))
}

/// `len` bytes of a buffer that only grows, from `start` on.
fn reserve(stage: &mut Vec<u8>, start: usize, len: Bytes) -> &mut [u8] {
    let end = start + len.index();
    if stage.len() < end {
        stage.resize(end, 0);
    }
    &mut stage[start..end]
}
