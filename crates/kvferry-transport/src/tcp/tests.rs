//! What comes over the port from somebody who does not follow the protocol.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, Memory};
use kvferry_plan::{
    Attempt, Bytes, CacheShape, Dtype, Generation, Incarnation, PageTable, Pair, Placement, PoolLayout,
    RankId, RoomId, RoomKey, Rotation, TokenRange,
};

use super::Tcp;
use crate::{
    Grant, Landed, Limits, Refusal, Registration, Setup, Transport, TransportError, TransportStats,
    wire::{self, Answer, Body, Header, Hello, LegId, Units},
};

const US: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
const PEER: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
const PATIENCE: Duration = Duration::from_secs(20);
/// One layer, 16 rows of 8 bytes a page, 2 pages granted: two units of 128 bytes.
const UNIT: usize = 128;

struct World {
    end: Tcp,
    arena: Arc<Arena>,
    landed: mpsc::Receiver<Landed>,
    leg: LegId,
}

fn world(limits: Limits) -> World {
    world_of(limits, 4)
}

fn world_of(limits: Limits, elems: u32) -> World {
    let end = Tcp::new(Setup { limits, ..Setup::new(US) }).unwrap();
    let shape = CacheShape::mla(1, elems);
    let place = Placement::single(&shape, 16, Dtype::Bf16);
    let layout = PoolLayout::new(&shape, &place, RankId(0), 8).unwrap();
    let arena = Arc::new(Arena::new("test", layout).unwrap());
    end.register(RankId(0), Registration::host(Arc::clone(&arena))).unwrap();
    let (send, landed) = mpsc::channel();
    let leg = LegId {
        key: RoomKey { room: RoomId(1), attempt: Attempt(1) },
        generation: Generation(3),
        source: RankId(0),
        target: RankId(0),
        tokens: TokenRange::new(0, 32),
        rotation: Rotation(0),
    };
    end.grant(Grant {
        key: leg.key,
        generation: leg.generation,
        peer: PEER,
        pair: Arc::new(Pair::new(shape, place.clone(), place).unwrap()),
        table: PageTable([kvferry_plan::PageId(5), kvferry_plan::PageId(2)].into()),
        slot: None,
        tokens: leg.tokens,
        ranks: vec![RankId(0)],
        digest: true,
        landed: Arc::new(move |landed| send.send(landed).unwrap()),
    })
    .unwrap();
    World { end, arena, landed, leg }
}

impl World {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.end.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// A connection after a correct hello.
    fn dial(&self) -> TcpStream {
        let mut stream = self.connect();
        let hello = Hello { version: wire::VERSION, from: PEER, to: US, ranks: None };
        stream.write_all(&wire::hello(&hello)).unwrap();
        let mut magic = [0; 8];
        stream.read_exact(&mut magic).unwrap();
        assert_eq!(magic, wire::MAGIC);
        let answer: Hello = message(&mut stream);
        assert_eq!((answer.from, answer.to), (US, PEER));
        stream
    }

    fn units(&self, stream: &mut TcpStream, units: Units, payload: &[u8]) {
        let header = Header { leg: self.leg, body: Body::Units(units) };
        stream.write_all(&wire::frame(&header, payload.len())).unwrap();
        stream.write_all(payload).unwrap();
    }

    fn end_leg(&self, stream: &mut TcpStream, ticket: u64) -> Option<Refusal> {
        let header = Header { leg: self.leg, body: Body::End(ticket) };
        stream.write_all(&wire::frame(&header, 0)).unwrap();
        let answer: Answer = message(stream);
        assert_eq!(answer.ticket, ticket);
        answer.refusal
    }

    /// A whole leg, as an honest peer sends it.
    fn honest(&self, stream: &mut TcpStream) {
        self.units(stream, whole(0, 2), &[7; 2 * UNIT]);
        assert_eq!(self.end_leg(stream, 99), None);
        let landed = self.landed.recv_timeout(PATIENCE).unwrap();
        assert_eq!(landed.outcome.unwrap().bytes, Bytes(2 * UNIT as u64));
    }

    fn pool(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.arena.layout().len().index()];
        self.arena.read(Bytes(0), &mut bytes).unwrap();
        bytes
    }

    /// Waits until a counter says what it must.
    fn until(&self, what: &str, reached: impl Fn(&TransportStats) -> bool) {
        let since = Instant::now();
        while !reached(&self.end.stats()) {
            assert!(since.elapsed() < PATIENCE, "{what}: {:?}", self.end.stats());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn message<T: for<'b> minicbor::Decode<'b, ()>>(stream: &mut TcpStream) -> T {
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; wire::message_len(len, wire::MAX_HEADER).unwrap()];
    stream.read_exact(&mut bytes).unwrap();
    wire::decode(&bytes).unwrap()
}

fn whole(first: u64, count: u64) -> Units {
    Units { first, count, row: 0, rows: None }
}

/// True when the other end has closed the connection without a word.
fn closed(stream: &mut TcpStream) -> bool {
    !matches!(stream.read(&mut [0; 64]), Ok(n) if n > 0)
}

#[test]
fn strangers_lose_their_connection_and_nobody_else() {
    let world = world(Limits::default());
    let mut honest = world.dial();
    let before = world.pool();
    let hello = wire::hello(&Hello { version: wire::VERSION, from: PEER, to: US, ranks: None });
    let mut absurd = hello[..8].to_vec();
    absurd.extend(u32::MAX.to_le_bytes());
    let mut nonsense = hello.clone();
    nonsense[12..].fill(0xff);
    let strangers: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 and what else TLS says",
        &[0; 4096],
        &[0xff; 4096],
        &absurd,
        &nonsense,
    ];
    for (i, bytes) in strangers.into_iter().enumerate() {
        let mut stream = world.connect();
        stream.write_all(bytes).unwrap();
        assert!(closed(&mut stream), "stranger {i} was answered");
    }
    world.until("counted", |stats| (stats.malformed, stats.length) == (5, 1));
    // Half a hello, and nothing at all.
    world.connect().write_all(&hello[..10]).unwrap();
    world.until("cut", |stats| stats.cut == 1);
    drop(world.connect());
    world.until("connections", |stats| stats.connections == 1);
    assert!(world.pool() == before);
    world.honest(&mut honest);
}

#[test]
fn frames_that_make_no_sense_end_the_connection() {
    let world = world(Limits::default());
    let frame =
        |payload: usize| wire::frame(&Header { leg: world.leg, body: Body::Units(whole(0, 1)) }, payload);
    let end = wire::frame(&Header { leg: world.leg, body: Body::End(0) }, 3);
    let mut long_header = frame(UNIT);
    long_header[..4].copy_from_slice(&(wire::MAX_HEADER + 1).to_le_bytes());
    let mut no_header = frame(UNIT);
    no_header[..4].fill(0);
    let mut nonsense = frame(UNIT);
    nonsense[9..].fill(0xff);
    let frames = [frame(1 << 30), frame(usize::MAX), long_header, no_header, nonsense, end];
    for (i, bytes) in frames.iter().enumerate() {
        let mut stream = world.dial();
        stream.write_all(bytes).unwrap();
        assert!(closed(&mut stream), "frame {i}");
    }
    world.until("counted", |stats| (stats.length, stats.malformed) == (4, 2));
    world.honest(&mut world.dial());
}

#[test]
fn units_out_of_place_are_refused_and_their_payload_dropped() {
    let world = world(Limits::default());
    let mut stream = world.dial();
    let before = world.pool();
    let rows = |row, rows| Units { first: 0, count: 1, row, rows: Some(rows) };
    let cases = [
        (whole(1, 1), UNIT, Refusal::Sequence),
        (whole(0, 3), 3 * UNIT, Refusal::Sequence),
        (whole(0, u64::MAX), UNIT, Refusal::Sequence),
        (whole(u64::MAX, 2), UNIT, Refusal::Sequence),
        (whole(0, 0), 0, Refusal::Sequence),
        (whole(0, 1), UNIT - 1, Refusal::Length),
        (whole(0, 1), UNIT + 1, Refusal::Length),
        (whole(0, 2), UNIT, Refusal::Length),
        (rows(0, 17), UNIT, Refusal::Sequence),
        (rows(0, u64::MAX), UNIT, Refusal::Sequence),
        (rows(3, 2), 16, Refusal::Sequence),
        (rows(0, 0), 0, Refusal::Sequence),
        (Units { first: 0, count: 2, row: 0, rows: Some(1) }, 8, Refusal::Sequence),
    ];
    let mut dropped = 0;
    for (i, (units, len, refusal)) in cases.into_iter().enumerate() {
        world.units(&mut stream, units, &vec![1; len]);
        assert_eq!(world.end_leg(&mut stream, i as u64), Some(refusal), "{units:?}");
        let landed = world.landed.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(landed.outcome, Err(TransportError::Refused { refusal: r, .. }) if r == refusal));
        dropped += len as u64;
    }
    // A leg that ends too early, with nothing and with half.
    assert_eq!(world.end_leg(&mut stream, 50), Some(Refusal::Missing));
    assert!(world.pool() == before);
    world.units(&mut stream, rows(0, 5), &[1; 40]);
    assert_eq!(world.end_leg(&mut stream, 51), Some(Refusal::Missing));
    assert_eq!(world.landed.try_iter().count(), 2);
    let stats = world.end.stats();
    assert_eq!(stats.dropped, Bytes(dropped));
    assert_eq!(stats.refused[&Refusal::Missing], 2);
    assert_eq!(stats.malformed, 0);
    // Piece by piece is fine, and the connection is as good as new.
    for row in 0..16 {
        world.units(&mut stream, rows(row, 1), &[row as u8; 8]);
    }
    world.units(&mut stream, whole(1, 1), &[9; UNIT]);
    assert_eq!(world.end_leg(&mut stream, 52), None);
    let digest = world.landed.recv_timeout(PATIENCE).unwrap().outcome.unwrap().parts;
    let mut payload: Vec<u8> = (0..16).flat_map(|row| [row; 8]).collect();
    payload.extend([9; UNIT]);
    world.units(&mut stream, whole(0, 2), &payload);
    assert_eq!(world.end_leg(&mut stream, 53), None);
    assert_eq!(world.landed.recv_timeout(PATIENCE).unwrap().outcome.unwrap().parts, digest);
}

#[test]
fn rooms_that_are_not_granted_are_refused() {
    let mut world = world(Limits::default());
    let mut stream = world.dial();
    let good = world.leg;
    let cases = [
        (LegId { key: RoomKey { room: RoomId(2), ..good.key }, ..good }, Refusal::Room),
        (LegId { key: RoomKey { attempt: Attempt(2), ..good.key }, ..good }, Refusal::Attempt),
        (LegId { generation: Generation(4), ..good }, Refusal::Generation),
        (LegId { source: RankId(1), ..good }, Refusal::Rank),
        (LegId { target: RankId(1), ..good }, Refusal::Rank),
        (LegId { tokens: TokenRange::new(0, 33), ..good }, Refusal::Range),
        (LegId { tokens: TokenRange::new(9, 8), ..good }, Refusal::Range),
        (LegId { tokens: TokenRange::new(0, u64::MAX), ..good }, Refusal::Range),
        (LegId { rotation: Rotation(1), ..good }, Refusal::Rotation),
    ];
    let before = world.pool();
    for (i, (leg, refusal)) in cases.into_iter().enumerate() {
        world.leg = leg;
        world.units(&mut stream, whole(0, 2), &[1; 2 * UNIT]);
        assert_eq!(world.end_leg(&mut stream, i as u64), Some(refusal), "{leg:?}");
    }
    assert!(world.pool() == before);
    assert_eq!(world.end.stats().refused.values().sum::<u64>(), 9);
    world.leg = good;
    // Strangers do not end the owner's room: only what was addressed to it rightly was reported.
    assert!(world.landed.try_iter().all(|landed| landed.generation == good.generation));
    world.honest(&mut stream);
}

#[test]
fn a_peer_that_stops_or_dies_in_the_middle_is_noticed() {
    let (stall, connect) = (Duration::from_millis(100), Duration::from_millis(300));
    let world = world(Limits { stall, connect, ..Limits::default() });
    let header = Header { leg: world.leg, body: Body::Units(whole(1, 1)) };
    for dies in [false, true] {
        let mut stream = world.dial();
        world.units(&mut stream, whole(0, 1), &[1; UNIT]);
        // Waiting between frames is no offence.
        thread::sleep(Duration::from_millis(250));
        stream.write_all(&wire::frame(&header, UNIT)).unwrap();
        stream.write_all(&[1; UNIT / 2]).unwrap();
        if dies {
            drop(stream);
        }
        let landed = world.landed.recv_timeout(PATIENCE).unwrap();
        match landed.outcome {
            Err(TransportError::Stalled { .. }) if !dies => {}
            Err(TransportError::PeerGone { .. }) if dies => {}
            other => panic!("{other:?}"),
        }
    }
    world.until("counted", |stats| (stats.stalled, stats.cut, stats.connections) == (1, 1, 0));
    // A hello that drips is cut off too.
    let mut stream = world.connect();
    for byte in wire::hello(&Hello { version: 1, from: PEER, to: US, ranks: None }) {
        thread::sleep(Duration::from_millis(60));
        if stream.write_all(&[byte]).is_err() {
            break;
        }
    }
    assert!(closed(&mut stream));
}

#[test]
fn connections_are_bounded_and_meant_for_this_start() {
    let world = world(Limits { connections: 2, ..Limits::default() });
    let (_first, second) = (world.dial(), world.dial());
    assert!(closed(&mut world.connect()), "a third was let in");
    drop(second);
    world.until("freed", |stats| stats.connections == 1);
    // Another start of this process is meant: the answer says who is here.
    let since = Instant::now();
    loop {
        let mut stream = world.connect();
        let hello = Hello { version: wire::VERSION, from: PEER, to: PEER, ranks: None };
        stream.write_all(&wire::hello(&hello)).unwrap();
        let mut magic = [0; 8];
        if stream.read_exact(&mut magic).is_ok() {
            assert_eq!(message::<Hello>(&mut stream).from, US);
            assert!(closed(&mut stream));
            break;
        }
        assert!(since.elapsed() < PATIENCE);
    }
    assert!(world.end.stats().turned_away >= 2);
}

/// Long runs are received straight into the pool. A peer that stops in the middle of one may not hold up the fence, and
/// what it sends afterwards is not written.
#[test]
fn a_fence_does_not_wait_for_a_frame_that_stops() {
    const LONG: usize = 16 * 1024;
    let world = world_of(Limits { stall: 10 * PATIENCE, ..Limits::default() }, 512);
    let mut stream = world.dial();
    let header = Header { leg: world.leg, body: Body::Units(whole(0, 2)) };
    stream.write_all(&wire::frame(&header, 2 * LONG)).unwrap();
    stream.write_all(&[7; LONG + 100]).unwrap();
    let since = Instant::now();
    while world.pool().iter().filter(|byte| **byte == 7).count() < LONG + 100 {
        assert!(since.elapsed() < PATIENCE, "nothing came into the pool");
        thread::sleep(Duration::from_millis(1));
    }
    let since = Instant::now();
    world.end.revoke(world.leg.key, world.leg.generation);
    assert!(since.elapsed() < PATIENCE);
    let fenced = world.pool();
    stream.write_all(&[9; LONG - 100]).unwrap();
    assert_eq!(world.end_leg(&mut stream, 1), Some(Refusal::Room));
    assert!(world.pool() == fenced);
    assert_eq!((world.end.stats().landed, world.end.stats().dropped), (Bytes(0), Bytes(LONG as u64 - 100)));
}

/// The legs of a job may come in turns.
#[test]
fn legs_in_turns() {
    let world = world(Limits::default());
    let mut stream = world.dial();
    let other = LegId { target: RankId(1), ..world.leg };
    world.units(&mut stream, whole(0, 1), &[7; UNIT]);
    // A rank that is not granted: refused, and no other leg is touched.
    let header = Header { leg: other, body: Body::Units(whole(0, 1)) };
    stream.write_all(&wire::frame(&header, UNIT)).unwrap();
    stream.write_all(&[8; UNIT]).unwrap();
    world.units(&mut stream, whole(1, 1), &[7; UNIT]);
    stream.write_all(&wire::frame(&Header { leg: other, body: Body::End(4) }, 0)).unwrap();
    let answer: Answer = message(&mut stream);
    assert_eq!((answer.ticket, answer.refusal), (4, Some(Refusal::Rank)));
    assert_eq!(world.end_leg(&mut stream, 5), None);
    assert_eq!(world.end.stats().landed, Bytes(2 * UNIT as u64));
}
