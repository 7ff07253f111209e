//! The source's half of a push: gathers rows of units into frames, in turns.

use std::{ops::Range, time::Instant};

use kvferry_arena::{Arena, PackedMut, RowHasher, Side, UnitRead, read_units};
use kvferry_plan::{Bytes, PartDigest, Unit, UnitId};

use crate::{
    Job, Leg, LegReport, TransportError,
    queue::Stop,
    wire::{LegId, MAX_PAYLOAD, Units},
};

/// What all legs of a job together have in a turn, if nothing is said. Smaller turns stay nearer to the processor and
/// cost more calls.
const TURN: Bytes = Bytes(1536 << 10);
/// A leg's part of it, at least.
const FRAME: u64 = 64 << 10;

/// Units of a leg, or rows of one, in the memory of a turn.
pub(crate) struct Frame {
    pub(crate) leg: LegId,
    pub(crate) units: Units,
    pub(crate) at: Range<usize>,
    /// Which of the job's legs.
    index: usize,
}

/// Where frames go.
pub(crate) trait Sink {
    /// Bytes of a turn, usually and at most. A row must fit.
    fn turn(&self) -> (Bytes, Bytes) {
        (TURN, Bytes(MAX_PAYLOAD))
    }
    /// Memory for the `len` bytes of the next turn.
    fn stage(&mut self, len: Bytes, stop: &Stop) -> Result<PackedMut<'_>, TransportError>;
    /// Sends the frames that lie there.
    fn send(&mut self, frames: &[Frame], stop: &Stop) -> Result<(), TransportError>;
    /// Says that a leg is complete, and returns the ticket under which the target will answer; tickets ascend.
    fn end(&mut self, leg: &LegId, stop: &Stop) -> Result<u64, TransportError>;
    /// Waits until the target has answered for all legs that ended; refusals count from ticket `first` on.
    fn settle(&mut self, job: &Job, first: u64, stop: &Stop) -> Result<(), TransportError>;
}

/// Sends all legs of `job` from `arena` to `sink`, in one sweep: in a turn each leg has a frame, and a unit of each leg
/// in turn goes into it, so that legs that read the same pages come to them at the same time.
pub(crate) fn push(
    job: &Job,
    arena: &Arena,
    sink: &mut impl Sink,
    stop: &Stop,
) -> Result<Vec<LegReport>, TransportError> {
    let started = Instant::now();
    let mut outs: Vec<_> = job.legs.iter().map(|leg| Out::new(job, leg)).collect();
    loop {
        stop.check()?;
        let (usual, most) = sink.turn();
        let frames = turn(&outs, usual, most)?;
        let Some(last) = frames.last() else { break };
        let into = sink.stage(Bytes(last.at.end as u64), stop)?;
        gather(&mut outs, &frames, into, job, arena)?;
        sink.send(&frames, stop)?;
    }
    let mut first = None;
    let mut reports = Vec::with_capacity(outs.len());
    for out in outs {
        stop.check()?;
        let ticket = sink.end(&out.id, stop)?;
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
        sink.settle(job, first, stop)?;
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
    /// The unit and row that come next.
    next: (u64, u64),
    /// Of a unit that is not gathered completely.
    hasher: Option<RowHasher>,
    parts: Vec<PartDigest>,
}

impl<'a> Out<'a> {
    fn new(job: &Job, leg: &'a Leg) -> Self {
        let id = LegId {
            key: job.key,
            generation: job.generation,
            source: job.source,
            target: leg.target,
            tokens: job.tokens,
            rotation: job.rotation,
        };
        Self { id, leg, next: (0, 0), hasher: None, parts: Vec::new() }
    }

    fn unit(&self, index: u64) -> Option<Unit<'a>> {
        self.leg.plan.unit(index)
    }

    /// What the leg has in a frame of `share` bytes, with its length, if that fits `left` bytes: whole units, or else
    /// some rows of a unit that is larger.
    fn frame(&self, share: u64, left: u64) -> Option<(Units, u64)> {
        let (first, row) = self.next;
        let unit = self.unit(first)?;
        if row > 0 || unit.bytes().0 > share {
            let each = unit.slice.len.0.max(1);
            let rows = (share / each).max(1).min(left / each).min(unit.rows() - row);
            return (rows > 0).then_some((Units { first, count: 1, row, rows: Some(rows) }, rows * each));
        }
        let (mut count, mut len) = (0, 0);
        while let Some(unit) = self.unit(first + count).filter(|unit| len + unit.bytes().0 <= share.min(left))
        {
            count += 1;
            len += unit.bytes().0;
        }
        (count > 0).then_some((Units { first, count, row: 0, rows: None }, len))
    }

    /// The next rows of a frame.
    fn rows(&self, frame: &Frame) -> Option<(Unit<'a>, Range<u64>)> {
        let Units { first, count, row, rows } = frame.units;
        let unit = self.unit(self.next.0).filter(|_| self.next.0 < first + count)?;
        match rows {
            None => Some((unit, 0..unit.rows())),
            Some(rows) => (self.next.1 == row).then_some((unit, row..row + rows)),
        }
    }

    /// Goes on behind rows that were gathered.
    fn gathered(&mut self, unit: &Unit<'_>, rows: &Range<u64>) {
        if rows.end < unit.rows() {
            self.next.1 = rows.end;
            return;
        }
        self.next = (self.next.0 + 1, 0);
        let sum = self.hasher.take().map_or(0, |hasher| hasher.digest());
        PartDigest::add(&mut self.parts, unit.part, sum, unit.bytes());
    }
}

/// The frames of the next turn, side by side; none when everything has been gathered.
fn turn(outs: &[Out<'_>], usual: Bytes, most: Bytes) -> Result<Vec<Frame>, TransportError> {
    let live = outs.iter().filter(|out| out.unit(out.next.0).is_some()).count() as u64;
    let share = (usual.0 / live.max(1)).max(FRAME).min(most.0);
    let mut frames = Vec::with_capacity(outs.len());
    let mut used = 0;
    for (index, out) in outs.iter().enumerate() {
        let Some(unit) = out.unit(out.next.0) else { continue };
        let row = unit.slice.len;
        if row > most {
            return Err(TransportError::RowTooLong { row, frame: most });
        }
        // A leg that has no room left has it in one of the next turns: others get done.
        let Some((units, len)) = out.frame(share, most.0 - used) else { continue };
        let at = Bytes(used).index()..Bytes(used + len).index();
        frames.push(Frame { leg: out.id, units, at, index });
        used += len;
    }
    Ok(frames)
}

/// Fills the frames, a unit of each in turn.
fn gather(
    outs: &mut [Out<'_>],
    frames: &[Frame],
    into: PackedMut<'_>,
    job: &Job,
    arena: &Arena,
) -> Result<(), TransportError> {
    let mut rest = Some(into);
    let mut places: Vec<_> = frames
        .iter()
        .map(|frame| {
            let (here, later) = rest.take()?.split_at(frame.at.len())?;
            rest = Some(later);
            Some(here)
        })
        .collect();
    loop {
        let mut taken = Vec::with_capacity(frames.len());
        let mut reads = Vec::with_capacity(frames.len());
        let mut each = frames.iter().zip(&mut places).peekable();
        for (index, out) in outs.iter_mut().enumerate() {
            let Some((frame, place)) = each.next_if(|(frame, _)| frame.index == index) else { continue };
            let Some((unit, rows)) = out.rows(frame) else { continue };
            let len = Bytes((rows.end - rows.start) * unit.slice.len.0);
            let into = place.take().and_then(|place| place.split_at(len.index())).map(|(here, later)| {
                *place = Some(later);
                here
            });
            if rows.start == 0 {
                let id = UnitId::new(job.key, out.leg.target, &unit);
                out.hasher = job.digest.then(|| RowHasher::new(id, unit.bytes()));
            }
            reads.push(UnitRead { unit, rows: rows.clone(), into, hasher: out.hasher.as_mut() });
            taken.push((index, unit, rows));
        }
        if reads.is_empty() {
            return Ok(());
        }
        read_units(arena, Side::Source, reads)?;
        for (index, unit, rows) in taken {
            if let Some(out) = outs.get_mut(index) {
                out.gathered(&unit, &rows);
            }
        }
    }
}
