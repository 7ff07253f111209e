//! What must not be written, and what must be found.

use std::{sync::mpsc, thread, time::Duration};

use kvferry_plan::{
    Attempt, CacheShape, Generation, Incarnation, PageId, PageTable, RankId, Rotation, TokenRange,
};

use super::{
    Start,
    world::{Options, PATIENCE, World, key},
};
use crate::{Inject, Job, Mover, Refusal, TransportError};

fn small(start: Start<'_>) -> World {
    World::new(start, &CacheShape::gqa(2, 3, 8), "tp=3", "tp=2", &Options::default())
}

fn refusal(world: &World, job: Job) -> Refusal {
    match world.execute(vec![job]).remove(0) {
        Err(TransportError::Refused { refusal, .. }) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Jobs that no grant covers are refused with the cause, are counted, and write nothing.
pub fn refused(start: Start<'_>) {
    let world = small(start);
    let tokens = TokenRange::new(0, 40);
    let room = world.room(1, 40);
    let job = || world.job(&room, RankId(1), tokens);
    let before = world.pools();
    assert_eq!(refusal(&world, job()), Refusal::Room);

    let half = TokenRange::new(0, 20);
    let mut grant = world.grant(&room, 40);
    grant.tokens = half;
    grant.ranks = vec![RankId(1)];
    world.target.transport.grant(grant).unwrap();
    let to_rank_1 = |mut job: Job| {
        job.legs.remove(0);
        job
    };
    let granted = || to_rank_1(world.job(&room, RankId(1), half));
    assert_eq!(refusal(&world, to_rank_1(job())), Refusal::Range);
    let mut to_rank_0 = world.job(&room, RankId(1), half);
    to_rank_0.legs.truncate(1);
    assert_eq!(refusal(&world, to_rank_0), Refusal::Rank);
    let generation = Generation(room.generation.0 + 1);
    assert_eq!(refusal(&world, Job { generation, ..granted() }), Refusal::Generation);
    let mut other = room.key;
    other.attempt = Attempt(2);
    assert_eq!(refusal(&world, Job { key: other, ..granted() }), Refusal::Attempt);
    assert_eq!(refusal(&world, Job { key: key(9), ..granted() }), Refusal::Room);
    world.target.transport.revoke(room.key, room.generation);

    // The grant is for another process.
    let mut grant = world.grant(&room, 40);
    grant.peer = Incarnation { started_ms: 5, nonce: 5 };
    world.target.transport.grant(grant).unwrap();
    assert_eq!(refusal(&world, job()), Refusal::Peer);
    world.target.transport.revoke(room.key, room.generation);

    assert!(world.pools() == before, "a refused job wrote something");
    let stats = world.target.transport.stats();
    for cause in
        [Refusal::Room, Refusal::Range, Refusal::Rank, Refusal::Generation, Refusal::Attempt, Refusal::Peer]
    {
        assert!(stats.refused.contains_key(&cause), "{cause:?} was not counted: {stats:?}");
    }
    assert_eq!(stats.landed.0, 0);
    // After all that, the link still works.
    world.target.transport.grant(world.grant(&room, 40)).unwrap();
    assert!(world.execute(vec![job()]).remove(0).is_ok());
}

/// Grants that contradict themselves or what is registered are refused.
pub fn grants(start: Start<'_>) {
    let world = small(start);
    let transport = &world.target.transport;
    let room = world.room(1, 40);
    let good = || world.grant(&room, 40);

    let mut grant = good();
    grant.ranks.push(RankId(9));
    assert!(matches!(transport.grant(grant), Err(TransportError::UnknownRank { rank: RankId(9), .. })));
    let mut grant = good();
    grant.ranks.push(RankId(0));
    assert!(matches!(transport.grant(grant), Err(TransportError::Invalid { .. })));
    let mut grant = good();
    grant.table.0.pop();
    assert!(matches!(transport.grant(grant), Err(TransportError::Invalid { .. })));
    let mut grant = good();
    grant.tokens.end.0 = u64::MAX;
    assert!(matches!(transport.grant(grant), Err(TransportError::Invalid { .. })));
    for wrong in [PageId(1 << 20), room.target.0[0]] {
        let mut grant = good();
        grant.table = PageTable([&room.target.0[..], &[wrong]].concat());
        assert!(matches!(transport.grant(grant), Err(TransportError::Plan(_))), "page {wrong}");
    }

    transport.grant(good()).unwrap();
    assert!(matches!(transport.grant(good()), Err(TransportError::Invalid { .. })), "granted twice");
    transport.revoke(room.key, Generation(room.generation.0 + 1));
    assert!(transport.grant(good()).is_err(), "revoked by another generation");
    transport.revoke(room.key, room.generation);
    transport.grant(good()).unwrap();
}

/// After `revoke` returns nothing is written any more, whatever is under way.
pub fn fence(start: Start<'_>) {
    for round in 0..8 {
        let options = Options { pool_pages: 80, ..Options::default() };
        let world = World::new(start, &CacheShape::gqa(4, 2, 64), "tp=1,page=32", "tp=2,page=32", &options);
        let tokens = TokenRange::new(0, 600);
        let room = world.granted(0, tokens.end.0);
        let wait = world.start(world.job(&room, RankId(0), tokens));
        let again = world.start(world.job(&room, RankId(0), tokens));
        // Early in some rounds, in the middle or after the end in others.
        thread::sleep(Duration::from_micros(300 * round));
        world.target.transport.revoke(room.key, room.generation);
        let fenced = world.pools();
        for outcome in [wait, again].map(|wait| wait.recv_timeout(PATIENCE).expect("a job was never done")) {
            if let Err(error) = outcome {
                let expected = matches!(error, TransportError::Refused { refusal: Refusal::Room, .. });
                assert!(expected, "{error:?}");
            }
        }
        assert!(world.pools() == fenced, "bytes landed after the fence");
        assert_eq!(world.target.transport.stats().grants, 0);
    }
}

/// A page that the source has given to somebody else is not taken for the room's. Only pulls can meet one: a source
/// that pushes pins its own pages.
pub fn stale_pages(start: Start<'_>) {
    let world = small(start);
    if world.mover() == Mover::Source {
        return;
    }
    let tokens = TokenRange::new(0, 40);
    let room = world.granted(1, 40);
    let job = world.job(&room, RankId(1), tokens);
    let page = room.source.0[1];
    world.source.arenas[1].next_generation(page).unwrap();
    match world.execute(vec![job]).remove(0) {
        Err(TransportError::StalePage { page: found, expected, found: generation }) => {
            assert_eq!((found, expected.0 + 1), (page, generation.0));
        }
        other => panic!("not found: {other:?}"),
    }
    // A page that was never offered is the caller's mistake.
    let mut job = world.job(&room, RankId(1), tokens);
    for leg in &mut job.legs {
        leg.source_pages.retain(|(p, _)| *p != page);
    }
    assert!(matches!(world.execute(vec![job]).remove(0), Err(TransportError::Invalid { .. })));
    assert!(world.execute(vec![world.job(&room, RankId(1), tokens)]).remove(0).is_ok());
}

/// All legs of a room count the source's pages from the same rank. Only of a push can it be otherwise: who pulls plans
/// both sides.
pub fn rotations(start: Start<'_>) {
    let with = |source, rotation| {
        let options = Options { rotation: Rotation(rotation), ..Options::default() };
        World::new(start, &CacheShape::mla(2, 24), source, "tp=2", &options)
    };
    let world = with("tp=2,shard=on", 1);
    if world.mover() == Mover::Target {
        return;
    }
    let tokens = TokenRange::new(0, 40);
    let (room, before) = (world.granted(1, 40), world.pools());
    let job =
        |source, rotation| Job { rotation: Rotation(rotation), ..world.job(&room, RankId(source), tokens) };
    for absurd in [2, u32::MAX] {
        assert_eq!(refusal(&world, job(0, absurd)), Refusal::Rotation);
    }
    assert!(world.pools() == before, "a refused job wrote something");
    // The first one that can be is the room's.
    world.execute(vec![job(0, 1)]).remove(0).unwrap();
    let before = world.pools();
    for source in [0, 1] {
        assert_eq!(refusal(&world, job(source, 0)), Refusal::Rotation);
    }
    assert!(world.pools() == before, "a refused job wrote something");
    world.execute(vec![job(1, 1)]).remove(0).unwrap();
    assert_eq!(world.target.transport.stats().refused[&Refusal::Rotation], 8);
    let honest = with("tp=2", 0);
    let room = honest.granted(1, 40);
    let job = Job { rotation: Rotation(1), ..honest.job(&room, RankId(0), tokens) };
    assert_eq!(refusal(&honest, job), Refusal::Rotation);

    // A rotation that all legs agree on, and by which the source did not plan: other units, or digests that differ.
    for cuts in [[0, 40, 40], [0, 32, 64]] {
        let world = with("tp=2,shard=on", 0);
        let room = world.granted(2, 64);
        let mut found = 0;
        for (source, tokens) in
            [0, 1].into_iter().flat_map(|s| cuts.windows(2).map(move |w| (s, TokenRange::new(w[0], w[1]))))
        {
            let job = Job { rotation: Rotation(1), ..world.job(&room, RankId(source), tokens) };
            match world.execute(vec![job]).remove(0) {
                Err(TransportError::Refused { .. }) => {
                    room.landed.try_iter().for_each(drop);
                    found += 1;
                }
                Err(error) => panic!("{error:?}"),
                Ok(legs) => {
                    for leg in legs {
                        let landed = room.landed.recv_timeout(PATIENCE).unwrap().outcome.unwrap();
                        found += usize::from(landed.parts != leg.parts);
                    }
                }
            }
        }
        assert!(found > 0, "{cuts:?}: nobody noticed");
    }
}

/// Every fault changes the pool, once, claims the bytes as moved, and shows in the target's digest.
pub fn faults(start: Start<'_>) {
    // These caches have no state.
    for inject in Inject::ALL.into_iter().filter(|fault| *fault != Inject::SwapState) {
        for (shape, source, target) in [
            (CacheShape::gqa(2, 3, 8), "tp=3", "tp=1"),
            (CacheShape::gqa(2, 4, 8), "tp=2", "tp=4"),
            (CacheShape::mla(3, 24), "tp=2", "tp=4,dcp=4"),
        ] {
            // One rank has no row of another's.
            if inject == Inject::MisrouteRow && target == "tp=1" {
                continue;
            }
            let options = Options { inject: Some(inject), ..Options::default() };
            let world = World::new(start, &shape, source, target, &options);
            let chunks = [TokenRange::new(0, 40), TokenRange::new(40, 70)];
            let room = world.granted(1, 70);
            let before = world.pools();
            let reports = world.hand_off(&room, &chunks);
            let differ = reports.iter().flatten().filter(|(_, (sent, leg))| *sent != leg.parts).count();
            assert!(differ > 0, "{inject} on {source} -> {target}: the digests agree");
            for (sent, leg) in reports.iter().flat_map(|r| r.values()) {
                let bytes = |parts: &[kvferry_plan::PartDigest]| parts.iter().map(|p| p.bytes.0).sum::<u64>();
                assert_eq!((bytes(sent), bytes(&leg.parts)), (leg.bytes.0, leg.bytes.0));
            }
            let model = world.model(&room, TokenRange::new(0, 70), &before);
            assert!(world.pools() != model, "{inject} on {source} -> {target}: nothing changed");
            assert_eq!(world.target.transport.stats().faults, 1);
            // Once per room: handed over again, it is whole.
            world.hand_off(&room, &chunks);
            assert!(world.pools() == world.model(&room, TokenRange::new(0, 70), &before));
        }
    }
}

/// Without digests the sums are 0, the bytes are counted, and a fault goes unnoticed here.
pub fn undigested(start: Start<'_>) {
    let options = Options { inject: Some(Inject::FlipByte), ..Options::default() };
    let world = World::new(start, &CacheShape::gqa(2, 3, 8), "tp=3", "tp=1", &options);
    let tokens = TokenRange::new(0, 40);
    let room = world.room(1, 40);
    let (send, landed) = mpsc::channel();
    let mut grant = world.grant(&room, 40);
    grant.digest = false;
    grant.landed = std::sync::Arc::new(move |leg| {
        let _ = send.send(leg);
    });
    world.target.transport.grant(grant).unwrap();
    let before = world.pools();
    let job = Job { digest: false, ..world.job(&room, RankId(0), tokens) };
    let mut legs = world.execute(vec![job]).remove(0).unwrap();
    if world.mover() == Mover::Source {
        legs.push(landed.recv_timeout(PATIENCE).unwrap().outcome.unwrap());
    }
    for leg in legs {
        assert!(leg.parts.iter().all(|part| part.sum == 0));
        assert_eq!(leg.parts.iter().map(|part| part.bytes.0).sum::<u64>(), leg.bytes.0);
        assert!(leg.bytes.0 > 0);
    }
    assert!(world.pools() != world.model(&room, tokens, &before));
}
