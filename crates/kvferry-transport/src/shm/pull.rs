//! The target's half of a pull: one sweep over each source page for all legs of a job.

use std::{collections::BTreeMap, io, sync::Arc, time::Instant};

use kvferry_arena::{Arena, ArenaView, Memory, Side, Stores, copy_in_turns, digest_unit};
use kvferry_plan::{
    Bytes, Generation, Incarnation, LayerId, PageId, Part, PartDigest, RankId, RoomKey, SlotId, StridedMove,
    Unit, UnitId,
};

use crate::{
    Done, Job, Leg, LegReport, Link, PeerAddr, Refusal, TransportError,
    inject::Spot,
    local::Local,
    queue::{Queue, Stop},
    room::{Room, writes_only},
    socket::Socket,
    stats::add,
};

/// A fence waits for at most about so many bytes.
const BATCH: u64 = 4 << 20;
/// So many bytes are still in the second-level cache when they are digested.
const HOT: u64 = 384 << 10;

/// Starts the link's thread, the puller.
pub(super) fn open(
    socket: Socket,
    views: BTreeMap<RankId, ArenaView>,
    peer: &PeerAddr,
    local: &Arc<Local>,
) -> io::Result<Arc<dyn Link>> {
    let views = Arc::new(views);
    let socket = Arc::new(socket);
    let puller = Puller {
        socket: Arc::clone(&socket),
        views: Arc::clone(&views),
        endpoint: peer.endpoint.clone(),
        peer: peer.incarnation,
        local: Arc::clone(local),
    };
    let limits = &local.setup.limits;
    let run = move |job: &Job, stop: &Stop| puller.pull(job, stop);
    let queue = Queue::start("kvferry-shm-pull", limits, &local.counters, run, move || socket.hang_up())?;
    Ok(Arc::new(ShmLink { queue, views }))
}

#[derive(Debug)]
struct ShmLink {
    queue: Queue,
    views: Arc<BTreeMap<RankId, ArenaView>>,
}

impl Link for ShmLink {
    fn execute(&self, job: Job, done: Done) -> Result<(), TransportError> {
        if !self.views.contains_key(&job.source) {
            return Err(TransportError::UnknownRank { rank: job.source, place: "at the peer" });
        }
        self.queue.execute(job, done)
    }

    fn cancel(&self, key: RoomKey) {
        self.queue.cancel(key);
    }

    fn close(&self) {
        self.queue.close();
    }
}

struct Puller {
    socket: Arc<Socket>,
    views: Arc<BTreeMap<RankId, ArenaView>>,
    endpoint: String,
    peer: Incarnation,
    local: Arc<Local>,
}

impl Puller {
    fn pull(&self, job: &Job, stop: &Stop) -> Result<Vec<LegReport>, TransportError> {
        let started = Instant::now();
        self.alive()?;
        let unknown = TransportError::UnknownRank { rank: job.source, place: "at the peer" };
        let view = self.views.get(&job.source).ok_or(unknown)?;
        let refuse = |refusal| {
            self.local.counters.refuse(refusal);
            TransportError::Refused { key: job.key, refusal }
        };
        let room = self.local.room(job.key, job.generation, self.peer).map_err(refuse)?;
        let courses = job.legs.iter().map(|leg| Course::new(&room, job, leg)).collect::<Result<_, _>>();
        let mut task = Task { job, view, room: &room, stop, courses: courses.map_err(refuse)? };
        for part in &room.grant().pair.shape().parts {
            for (channels, _) in (0..).zip(part.groups()) {
                for &layer in &part.layers {
                    let landed = task.layer((layer, part.part, channels))?;
                    add(&self.local.counters.landed, landed.0);
                    add(&self.local.counters.frames, 1);
                }
            }
        }
        // What the last pages say is worth nothing if the process behind them is gone.
        self.alive()?;
        room.check()?;
        add(&self.local.counters.legs, task.courses.len() as u64);
        let took = started.elapsed();
        let report = |course: Course<'_>| LegReport {
            target: course.leg.target,
            bytes: course.leg.plan.bytes(),
            copies: course.leg.plan.copies(),
            parts: course.parts,
            took,
        };
        Ok(task.courses.into_iter().map(report).collect())
    }

    /// Fails once the source has closed the connection, which the end of its process does.
    fn alive(&self) -> Result<(), TransportError> {
        if self.socket.quiet() {
            return Ok(());
        }
        let reason = "its process ended or closed the transport".into();
        Err(TransportError::PeerGone { endpoint: self.endpoint.clone(), reason })
    }
}

/// A leg while its job is executed.
struct Course<'a> {
    leg: &'a Leg,
    arena: Arc<Arena>,
    generations: BTreeMap<Place, Generation>,
    /// The next unit.
    next: u64,
    parts: Vec<PartDigest>,
}

impl<'a> Course<'a> {
    /// Checks a leg against the grant.
    fn new(room: &Room, job: &Job, leg: &'a Leg) -> Result<Self, Refusal> {
        let arena = Arc::clone(room.arena(job.source, leg.target, job.tokens)?);
        if !writes_only(&leg.plan, room.grant()) {
            return Err(Refusal::Range);
        }
        let pages = leg.source_pages.iter().map(|(page, generation)| (Place::Page(*page), *generation));
        let slot = leg.source_slot.map(|(slot, generation)| (Place::Slot(slot), generation));
        let generations = pages.chain(slot).collect();
        Ok(Self { leg, arena, generations, next: 0, parts: Vec::new() })
    }
}

/// What is owned at the source as a whole, and has a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Page(PageId),
    Slot(SlotId),
}

/// The units of one layer of one part, and of state of one channel group.
type Layer = (LayerId, Part, u32);

/// One strided copy of a sweep.
struct Step {
    page: Place,
    /// Index of the leg.
    leg: usize,
    m: StridedMove,
}

/// A job that is executed.
struct Task<'a> {
    job: &'a Job,
    view: &'a ArenaView,
    room: &'a Room,
    stop: &'a Stop,
    courses: Vec<Course<'a>>,
}

impl<'a> Task<'a> {
    /// Sweeps the source pages of one layer of one part and digests what was written.
    fn layer(&mut self, of: Layer) -> Result<Bytes, TransportError> {
        let mut landed = 0;
        let mut rest = self.units(of);
        while !rest.is_empty() {
            // A fault may hit any unit of the layer, so then all of them are one batch.
            let most = match (self.room.faulty(), self.job.digest) {
                (true, _) => u64::MAX,
                (false, true) => HOT,
                (false, false) => BATCH,
            };
            let later = rest.split_off(cut(&rest, most));
            landed += self.batch(of, rest)?;
            rest = later;
        }
        Ok(Bytes(landed))
    }

    /// Copies these units, then digests them.
    fn batch(&mut self, of: Layer, units: Vec<(usize, Unit<'a>)>) -> Result<u64, TransportError> {
        let (layer, part, _) = of;
        let steps = self.steps(layer, part, &units)?;
        let spots = || {
            let spot = |(i, unit): &(usize, Unit<'_>)| {
                let course = &self.courses[*i];
                Spot::new(self.job.source, course.leg.target, &course.arena, unit, 0..unit.rows())
            };
            units.iter().map(spot).collect()
        };
        self.stop.check()?;
        self.room.write(spots, || self.sweep(&steps))?;
        for (i, unit) in units {
            let course = &mut self.courses[i];
            let id = UnitId::new(self.job.key, course.leg.target, &unit);
            let sum = if self.job.digest { digest_unit(&*course.arena, Side::Target, &unit, id)? } else { 0 };
            PartDigest::add(&mut course.parts, part, sum, unit.bytes());
        }
        Ok(steps.iter().map(|step| step.m.bytes().0).sum())
    }

    /// The next units of all legs, which are those of this layer and part: plans have the order of the shape. The
    /// first ones of all legs come first, then the second ones: they read the same source pages.
    fn units(&mut self, of: Layer) -> Vec<(usize, Unit<'a>)> {
        let mut units = Vec::new();
        for (i, course) in self.courses.iter_mut().enumerate() {
            let plan = &course.leg.plan;
            let mut turn = 0_u64;
            while let Some(unit) = plan.unit(course.next).filter(|u| (u.layer, u.part, u.channels) == of) {
                units.push((turn, i, unit));
                course.next += 1;
                turn += 1;
            }
        }
        units.sort_by_key(|(turn, i, _)| (*turn, *i));
        units.into_iter().map(|(_, i, unit)| (i, unit)).collect()
    }

    /// The copies of these units, by source page; within a page legs and tokens stay in order.
    fn steps(
        &self,
        layer: LayerId,
        part: Part,
        units: &[(usize, Unit<'_>)],
    ) -> Result<Vec<Step>, TransportError> {
        let mut steps = Vec::new();
        for (i, unit) in units {
            let Some(layout) = self.room.grant().pair.src().part(part) else { continue };
            let (src, dst) = (self.view.region(layer, part)?, self.courses[*i].arena.region(layer, part)?);
            let pages = unit.runs.iter().map(|run| match (part.is_state(), layout.page(run.src_row)) {
                // A slot's rows are its window, as a page's rows are the page.
                (true, page) => Place::Slot(SlotId(page.0)),
                (false, page) => Place::Page(page),
            });
            steps.extend(pages.zip(unit.moves(src, dst)).map(|(page, m)| Step { page, leg: *i, m }));
        }
        steps.sort_by_key(|step| step.page);
        Ok(steps)
    }

    /// Executes steps page by page, and checks each page before and after.
    fn sweep(&self, steps: &[Step]) -> Result<(), TransportError> {
        // Through the cache when a digest reads the bytes next, past it when nobody does soon.
        let stores = if self.job.digest { Stores::Cached } else { Stores::Streaming };
        for page in steps.chunk_by(|a, b| a.page == b.page) {
            self.unchanged(page)?;
            let moves = page.iter().map(|step| (&*self.courses[step.leg].arena, &step.m));
            copy_in_turns(self.view, moves, stores)?;
            self.unchanged(page)?;
        }
        Ok(())
    }

    /// Fails unless the page of these steps has the generation that the source offered for each leg.
    fn unchanged(&self, steps: &[Step]) -> Result<(), TransportError> {
        for Step { page, leg, .. } in steps.chunk_by(|a, b| a.leg == b.leg).filter_map(<[Step]>::first) {
            let found = match page {
                Place::Page(page) => self.view.generation(*page)?,
                Place::Slot(slot) => self.view.slot_generation(*slot)?,
            };
            match (self.courses[*leg].generations.get(page), page) {
                (Some(expected), _) if *expected == found => {}
                (Some(&expected), Place::Page(page)) => {
                    return Err(TransportError::StalePage { page: *page, expected, found });
                }
                (Some(&expected), Place::Slot(slot)) => {
                    return Err(TransportError::StaleSlot { slot: *slot, expected, found });
                }
                (None, place) => {
                    let reason = format!("source {place:?} is in the plan, but not offered with the leg");
                    return Err(TransportError::Invalid { key: self.job.key, reason });
                }
            }
        }
        Ok(())
    }
}

/// How many units make up about `most` bytes, at least one.
fn cut(units: &[(usize, Unit<'_>)], most: u64) -> usize {
    let mut bytes = 0_u64;
    let fits = |(_, unit): &&(usize, Unit<'_>)| {
        bytes = bytes.saturating_add(unit.bytes().0);
        bytes <= most
    };
    units.iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use kvferry_plan::{
        Attempt, CacheShape, Dtype, PageTable, Pair, Placement, PoolLayout, RoomId, Rotation, Strides,
        TokenRange,
    };

    use super::*;
    use crate::{Grant, Registration, Setup};

    /// A page that changes its owner *while* it is copied is found out afterwards. So that this happens at the
    /// right moment in each run, the copy itself writes the generation: source and target are one arena here.
    #[test]
    fn a_page_that_changes_while_it_is_copied_is_stale() {
        let shape = CacheShape::mla(1, 4);
        let place = Placement::single(&shape, 16, Dtype::Bf16);
        let layout = PoolLayout::new(&shape, &place, RankId(0), 4).unwrap();
        let arena = Arc::new(Arena::new("test", layout.clone()).unwrap());
        let row = layout.regions()[0].offset;
        arena.write(row, &[9, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let view = ArenaView::map(arena.fd(), layout.clone()).unwrap();

        let (us, peer) = (Incarnation::default(), Incarnation { started_ms: 1, nonce: 1 });
        let local = Local::new(Setup::new(us));
        local.register(RankId(0), Registration::host(Arc::clone(&arena))).unwrap();
        let key = RoomKey { room: RoomId(1), attempt: Attempt(1) };
        let (generation, tokens) = (Generation(1), TokenRange::new(0, 16));
        let pair = Arc::new(Pair::new(shape, place.clone(), place).unwrap());
        let (table, ranks) = (PageTable([PageId(3)].into()), vec![RankId(0)]);
        let landed = Arc::new(drop);
        local
            .grant(Grant {
                key,
                generation,
                peer,
                pair,
                table,
                slot: None,
                tokens,
                ranks,
                digest: true,
                landed,
            })
            .unwrap();
        let room = local.room(key, generation, peer).unwrap();

        let leg = Leg {
            target: RankId(0),
            plan: Arc::default(),
            source_pages: vec![(PageId(1), Generation(0))],
            source_slot: None,
        };
        let (source, rotation) = (RankId(0), Rotation(0));
        let job = Job { key, generation, source, tokens, rotation, digest: true, legs: vec![leg] };
        let courses = vec![Course::new(&room, &job, &job.legs[0]).unwrap()];
        let task = Task { job: &job, view: &view, room: &room, stop: &Stop::default(), courses };
        let to = |offset| {
            let strides = |offset| Strides { offset, row: Bytes(8), block: Bytes(8) };
            let m = StridedMove {
                src: strides(row),
                dst: strides(offset),
                len: Bytes(8),
                rows: 1,
                blocks: 1,
                cast: None,
            };
            Step { page: Place::Page(PageId(1)), leg: 0, m }
        };
        task.sweep(&[to(Bytes(row.0 + 64))]).unwrap();
        let word = layout.generation_offset(PageId(1)).unwrap();
        match task.sweep(&[to(word)]) {
            Err(TransportError::StalePage { page, expected, found }) => {
                assert_eq!((page, expected, found), (PageId(1), Generation(0), Generation(9)));
            }
            other => panic!("{other:?}"),
        }
    }
}
