//! Links and ends that close, die, or are asked too much.

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use kvferry_plan::{Bytes, CacheShape, Descriptor, Incarnation, PROTOCOL, RankId, TokenRange};

use super::{
    Start,
    world::{Options, PATIENCE, SOURCE, TARGET, World, done},
};
use crate::{Limits, Mover, PeerAddr, Setup, TransportError, TransportStats};

const TOKENS: TokenRange = TokenRange { start: kvferry_plan::Token(0), end: kvferry_plan::Token(120) };

fn world(start: Start<'_>, options: &Options) -> World {
    World::new(start, &CacheShape::mla(3, 24), "tp=2", "tp=4,dcp=4", options)
}

/// A closed link or transport takes no job, and every job that it took is done.
pub fn closed(start: Start<'_>) {
    let world = world(start, &Options::default());
    let room = world.granted(1, TOKENS.end.0);
    let waits: Vec<_> = (0..20).map(|_| world.start(world.job(&room, RankId(0), TOKENS))).collect();
    world.link.close();
    let fenced = world.pools();
    for wait in waits {
        match wait.recv_timeout(PATIENCE).expect("a job was never done") {
            Ok(_) | Err(TransportError::Closed) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    let (callback, wait) = done();
    let refused = world.link.execute(world.job(&room, RankId(0), TOKENS), callback);
    assert!(matches!(refused, Err(TransportError::Closed)));
    assert!(wait.recv().is_err(), "the callback of a job that was not taken was called");
    if world.mover() == Mover::Target {
        assert!(world.pools() == fenced, "the link wrote after it was closed");
    }
    world.link.close();
    world.executor().transport.close();
    assert!(matches!(world.executor().transport.open(&addr(&world)), Err(TransportError::Closed)));
}

/// Two ends that have moved something and have nothing to do, while `during` is called. It may measure what they use then;
/// so this is none of [`super::CHECKS`], which run beside each other.
pub fn at_rest(start: Start<'_>, during: &mut dyn FnMut()) {
    let world = world(start, &Options::default());
    let room = world.granted(1, TOKENS.end.0);
    world.start(world.job(&room, RankId(0), TOKENS)).recv_timeout(PATIENCE).expect("never done").unwrap();
    during();
}

/// The other end, as a peer.
fn addr(world: &World) -> PeerAddr {
    let (incarnation, placement) = match world.mover() {
        Mover::Source => (TARGET, world.pair.dst()),
        Mover::Target => (SOURCE, world.pair.src()),
    };
    let descriptor = Descriptor {
        protocol: PROTOCOL,
        model: "m".into(),
        shape: world.pair.shape().clone(),
        placement: placement.clone(),
        converts: false,
    };
    PeerAddr {
        endpoint: world.other().transport.endpoint(),
        incarnation,
        descriptor: std::sync::Arc::new(descriptor),
    }
}

/// A peer that goes away is an error, soon, for jobs that run and for later ones.
pub fn gone(start: Start<'_>) {
    let limits = Limits::default();
    let world = world(start, &Options::default());
    let room = world.granted(1, TOKENS.end.0);
    let running: Vec<_> = (0..50).map(|_| world.start(world.job(&room, RankId(0), TOKENS))).collect();
    world.other().transport.close();
    let since = Instant::now();
    for wait in running {
        // What was under way may still have come through, or have met the fence first.
        match wait.recv_timeout(PATIENCE).expect("a job was never done") {
            Ok(_) | Err(TransportError::PeerGone { .. } | TransportError::Refused { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    match world.execute(vec![world.job(&room, RankId(0), TOKENS)]).remove(0) {
        Err(TransportError::PeerGone { .. }) => {}
        other => panic!("not noticed: {other:?}"),
    }
    assert!(since.elapsed() < limits.stall * 5);
    match world.executor().transport.open(&addr(&world)) {
        Err(TransportError::PeerGone { .. }) => {}
        other => panic!("not noticed: {other:?}"),
    }
}

/// Another start of the peer, or something that is no peer, is told apart when a link is opened.
pub fn restarted(start: Start<'_>) {
    let world = world(start, &Options::default());
    let transport = &world.executor().transport;
    let mut other = addr(&world);
    let expected = Incarnation { started_ms: 99, nonce: 1 };
    let found = std::mem::replace(&mut other.incarnation, expected);
    match transport.open(&other) {
        Err(TransportError::Restarted { expected: e, found: f, .. }) => assert_eq!((e, f), (expected, found)),
        result => panic!("opened: {result:?}"),
    }
    for endpoint in ["", "tcp://", "mem://x", "shm://relative", "http://127.0.0.1:1"] {
        match transport.open(&PeerAddr { endpoint: endpoint.into(), ..addr(&world) }) {
            Err(TransportError::Endpoint { .. }) => {}
            result => panic!("`{endpoint}` opened: {result:?}"),
        }
    }
}

/// A peer that is gone for the control plane holds no connection any more; it may come again.
pub fn forgotten(start: Start<'_>) {
    let world = world(start, &Options::default());
    let room = world.granted(1, TOKENS.end.0);
    world.hand_off(&room, &[TOKENS]);
    let (executor, other) = match world.mover() {
        Mover::Source => (SOURCE, &world.target.transport),
        Mover::Target => (TARGET, &world.source.transport),
    };
    let connections = other.stats().connections;
    other.forget(Incarnation { nonce: 99, ..executor });
    assert_eq!(other.stats().connections, connections, "somebody else's");
    other.forget(executor);
    let deadline = Instant::now() + PATIENCE;
    while other.stats().connections > 0 {
        assert!(Instant::now() < deadline, "a connection stays");
        std::thread::yield_now();
    }
    world.executor().transport.open(&addr(&world)).unwrap();
}

/// A full queue says so instead of growing.
pub fn bounded(start: Start<'_>) {
    let limits = Limits { jobs: 2, ..Limits::default() };
    let world = world(start, &Options { limits, ..Options::default() });
    let room = world.granted(1, TOKENS.end.0);
    let job = || world.job(&room, RankId(0), TOKENS);
    // Holds the link's thread in a callback.
    let (entered, enter) = mpsc::channel();
    let (release, hold) = mpsc::channel::<()>();
    let held = Box::new(move |_| {
        let _ = entered.send(());
        let _ = hold.recv();
    });
    world.link.execute(job(), held).unwrap();
    enter.recv_timeout(PATIENCE).unwrap();
    let waits = [world.start(job()), world.start(job())];
    let (callback, _wait) = done();
    assert!(matches!(world.link.execute(job(), callback), Err(TransportError::Busy { queued: 2 })));
    drop(release);
    for wait in waits {
        wait.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    let (callback, _wait) = done();
    assert!(matches!(
        world.link.execute(crate::Job { source: RankId(7), ..job() }, callback),
        Err(TransportError::UnknownRank { rank: RankId(7), .. })
    ));
}

/// A link with a rate moves no faster, and waiting for it does not keep a room from being cancelled.
pub fn paced(start: Start<'_>) {
    let bytes = {
        let world = world(start, &Options::default());
        let room = world.granted(1, TOKENS.end.0);
        let reports = world.execute(vec![world.job(&room, RankId(0), TOKENS)]).remove(0).unwrap();
        reports.iter().map(|report| report.bytes.0).sum::<u64>()
    };
    // Ten jobs a second.
    let limits = Limits { rate: Some(Bytes(bytes * 10)), ..Limits::default() };
    let world = world(start, &Options { limits, ..Options::default() });
    let (room, other) = (world.granted(1, TOKENS.end.0), world.granted(2, TOKENS.end.0));
    let started = Instant::now();
    let waits: Vec<_> = (0..4).map(|_| world.start(world.job(&room, RankId(0), TOKENS))).collect();
    for wait in waits {
        wait.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    assert!(started.elapsed() >= Duration::from_millis(300), "{:?}", started.elapsed());
    let waits: Vec<_> = (0..1000).map(|_| world.start(world.job(&other, RankId(0), TOKENS))).collect();
    world.link.cancel(other.key);
    for wait in waits.into_iter().skip(2) {
        assert!(matches!(wait.recv_timeout(PATIENCE).unwrap(), Err(TransportError::Cancelled)));
    }
}

/// Cancelling a room ends its jobs and no others.
pub fn cancelled(start: Start<'_>) {
    let world = world(start, &Options::default());
    let (room, other) = (world.granted(1, TOKENS.end.0), world.granted(2, TOKENS.end.0));
    let before = world.pools();
    let mut waits = Vec::new();
    for _ in 0..10 {
        waits.push((true, world.start(world.job(&room, RankId(0), TOKENS))));
        waits.push((false, world.start(world.job(&other, RankId(0), TOKENS))));
        waits.push((false, world.start(world.job(&other, RankId(1), TOKENS))));
    }
    world.link.cancel(room.key);
    for (may_be_cancelled, wait) in waits {
        match wait.recv_timeout(PATIENCE).expect("a job was never done") {
            Ok(_) => {}
            Err(TransportError::Cancelled) if may_be_cancelled => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    // The link goes on, for the cancelled room too.
    for source in [RankId(0), RankId(1)] {
        world.execute(vec![world.job(&room, source, TOKENS)]).remove(0).unwrap();
    }
    let model = world.model(&other, TOKENS, &world.model(&room, TOKENS, &before));
    assert!(world.pools() == model);
}

/// When everything is closed nothing is held any more.
pub fn nothing_left(start: Start<'_>) {
    let world = world(start, &Options::default());
    let room = world.granted(1, TOKENS.end.0);
    world.hand_off(&room, &[TOKENS]);
    assert_eq!(world.executor().transport.stats().links, 1);
    assert_eq!(world.target.transport.stats().grants, 1);
    let World { source, target, link, .. } = world;
    drop(link);
    source.transport.close();
    target.transport.close();
    for transport in [&source.transport, &target.transport] {
        let TransportStats { connections, links, grants, jobs, .. } = transport.stats();
        assert_eq!((connections, links, grants, jobs), (0, 0, 0, 0));
    }
    // Endpoints are free again, and differ from one end to the next.
    let next = start(Setup::new(SOURCE)).unwrap();
    assert_ne!(next.endpoint(), source.transport.endpoint());
}
