//! What comes over the control connection from somebody who does not follow the protocol, or falls silent.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Command},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::Buffer;
use kvferry_plan::{Attempt, Bytes, Generation, Incarnation, RankId, RoomId, RoomKey, Rotation, TokenRange};
use minicbor::bytes::ByteVec;

use super::{
    BlockEngine, BlockSpan, EngineError, EnginePeer, Progress, SlotOptions, Slots, WriteId,
    wire::{BlockFrame, MAX_MESSAGE, Opening, Reply, Request, SlotRef},
    witness::ProcessId,
};
use crate::{
    DeviceId, Limits, MemoryKind, Refusal, Setup, Transport,
    local::lock,
    wire::{self, Answer, Hello, LegId, Units},
};

const US: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
const PEER: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
const PATIENCE: Duration = Duration::from_secs(20);
const SLOT: u32 = 4096;

/// An engine that moves nothing, hears what a test says, and may be the only one to write its memory.
#[derive(Debug)]
struct Still {
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
    alone: bool,
}

impl BlockEngine for Still {
    fn register(
        &mut self,
        memory: Arc<Buffer>,
        kind: MemoryKind,
        device: DeviceId,
    ) -> Result<BlockSpan, EngineError> {
        Ok(BlockSpan { address: memory.address(), len: memory.len(), kind, device })
    }

    fn metadata(&mut self) -> Result<Vec<u8>, EngineError> {
        Ok(Vec::new())
    }

    fn connect(&mut self, metadata: &[u8]) -> Result<EnginePeer, EngineError> {
        match metadata {
            b"" => Ok(EnginePeer(1)),
            _ => Err(EngineError::Failed { engine: "still", action: "connect", reason: "not mine".into() }),
        }
    }

    fn disconnect(&mut self, _: EnginePeer) {}

    fn write(&mut self, _: EnginePeer, _: BlockSpan, _: BlockSpan) -> Result<WriteId, EngineError> {
        Ok(WriteId(0))
    }

    fn poll(&mut self, _: WriteId) -> Result<Progress, EngineError> {
        Ok(Progress::Moving)
    }

    fn release(&mut self, _: WriteId) {}

    fn writes_alone(&self) -> bool {
        self.alone
    }

    fn notify(&mut self, _: EnginePeer, _: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn notifications(&mut self) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(std::mem::take(&mut *lock(&self.heard)))
    }
}

struct World {
    end: Slots,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Stands for the process of the peer.
    process: Child,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn world(stall: Duration) -> World {
    world_of(stall, false)
}

fn world_of(stall: Duration, alone: bool) -> World {
    let heard = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let theirs = Arc::clone(&heard);
    let limits = Limits { stall, connect: Duration::from_millis(300), ..Limits::default() };
    let options = SlotOptions { slot: Bytes(SLOT.into()), slots: 2, staging: 1, window: 1, kept: 1 };
    let start = Box::new(move || {
        let heard = Arc::clone(&theirs);
        Ok(Box::new(Still { heard, alone }) as Box<dyn BlockEngine>)
    });
    let end = Slots::new(Setup { limits, ..Setup::new(US) }, options, ("still", "none"), start).unwrap();
    World { end, heard, process: Command::new("sleep").arg("600").spawn().unwrap() }
}

fn send(stream: &mut TcpStream, request: &Request) {
    stream.write_all(&wire::tagged(request)).unwrap();
}

/// The next reply, `None` when the connection has ended.
fn hear(stream: &mut TcpStream) -> Option<Reply> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).ok()?;
    let mut bytes = vec![0; wire::message_len(len, MAX_MESSAGE)?];
    stream.read_exact(&mut bytes).ok()?;
    wire::decode(&bytes)
}

fn slot(stream: &mut TcpStream) -> SlotRef {
    send(stream, &Request::Ask);
    match hear(stream).unwrap() {
        Reply::Slot(slot) => slot,
        other => panic!("{other:?}"),
    }
}

fn frame(len: u32) -> BlockFrame {
    let leg = LegId {
        key: RoomKey { room: RoomId(1), attempt: Attempt(1) },
        generation: Generation(1),
        source: RankId(0),
        target: RankId(0),
        tokens: TokenRange::new(0, 1),
        rotation: Rotation(0),
    };
    BlockFrame { leg, units: Units { first: 0, count: 1, row: 0, rows: None }, len }
}

impl World {
    /// A connection that has said hello and who it is.
    fn opening(&self, metadata: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.end.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello = Hello { version: wire::VERSION, from: PEER, to: US, ranks: None };
        stream.write_all(&wire::hello(&hello)).unwrap();
        let mut magic = [0; 8];
        stream.read_exact(&mut magic).unwrap();
        let mut len = [0; 4];
        stream.read_exact(&mut len).unwrap();
        stream.read_exact(&mut vec![0; u32::from_le_bytes(len) as usize]).unwrap();
        let opening = Opening {
            metadata: ByteVec::from(metadata.to_vec()),
            token: ByteVec::from(b"token".to_vec()),
            process: ProcessId::of(self.process.id()),
        };
        stream.write_all(&wire::tagged(&opening)).unwrap();
        stream
    }

    /// A link, as an honest peer has it.
    fn dial(&self) -> TcpStream {
        let mut stream = self.opening(b"");
        assert!(
            matches!(hear(&mut stream), Some(Reply::Memory(memory)) if memory.slot == Bytes(SLOT.into()))
        );
        lock(&self.heard).push(b"token".to_vec());
        assert_eq!(hear(&mut stream), Some(Reply::Ready));
        stream
    }

    fn until(&self, what: &str, slots: u64, fenced: u64) {
        let since = Instant::now();
        loop {
            let stats = self.end.stats();
            if (stats.slots, stats.fenced) == (slots, fenced) {
                return;
            }
            assert!(since.elapsed() < PATIENCE, "{what}: {stats:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn who_breaks_the_rules_is_cut_off_and_its_slots_are_fenced_off() {
    let mut world = world(PATIENCE);
    let wrong: [fn(SlotRef) -> Request; 5] = [
        |slot| Request::Block(SlotRef { index: 7, ..slot }, Vec::new()),
        |slot| Request::Block(SlotRef { serial: slot.serial + 1, ..slot }, Vec::new()),
        |slot| Request::Block(SlotRef { era: 2, ..slot }, Vec::new()),
        |slot| Request::Block(slot, vec![frame(SLOT + 1)]),
        |slot| Request::Block(slot, vec![frame(SLOT), frame(1)]),
    ];
    for (i, request) in wrong.into_iter().enumerate() {
        let mut stream = world.dial();
        let slot = slot(&mut stream);
        send(&mut stream, &request(slot));
        assert_eq!(hear(&mut stream), None, "{i}");
        // A block that was too long has settled; the others nobody knows.
        world.until("cut off", 0, u64::from(i < 3));
        let mut again = world.dial();
        send(&mut again, &Request::Release(vec![slot]));
        world.until("given back", 0, 0);
    }
    // More than anybody asks for.
    let mut stream = world.dial();
    for _ in 0..2000 {
        if stream.write_all(&wire::tagged(&Request::Ask)).is_err() {
            break;
        }
    }
    while hear(&mut stream).is_some() {}
    world.until("cut off", 0, 2);
    assert_eq!(world.end.stats().malformed, 6);
    // Its process ends: then so does the fence.
    world.process.kill().unwrap();
    world.process.wait().unwrap();
    let mut stream = world.dial();
    slot(&mut stream);
}

/// A connection may end with a grant that its source has not heard of, or before what it gave back is read: the next
/// connection says what is still on its way, and that is all that stays fenced off.
#[test]
fn what_earlier_connections_held_is_settled_by_the_next() {
    let world = world(PATIENCE);
    let mut stream = world.dial();
    let (lost, _unheard) = (slot(&mut stream), slot(&mut stream));
    drop(stream);
    world.until("its connection has ended", 0, 2);
    let mut stream = world.dial();
    send(&mut stream, &Request::Rest(vec![lost]));
    let again = slot(&mut stream);
    world.until("one is free", 1, 1);
    send(&mut stream, &Request::Release(vec![again, lost]));
    world.until("both are free", 0, 0);

    // The earlier one is noticed to have ended after the later one has said so.
    let mut early = world.dial();
    slot(&mut early);
    let mut late = world.dial();
    send(&mut late, &Request::Rest(Vec::new()));
    let held = slot(&mut late);
    drop(early);
    world.until("the earlier connection has ended", 1, 0);
    send(&mut late, &Request::Release(vec![held]));
    world.until("given back", 0, 0);
}

/// Rooms that are not granted are refused as over any other way, and the slot is free again.
#[test]
fn blocks_for_no_room() {
    let world = world(PATIENCE);
    let mut stream = world.dial();
    for ticket in 0..5 {
        let slot = slot(&mut stream);
        send(&mut stream, &Request::Block(slot, vec![frame(10)]));
        send(&mut stream, &Request::End(frame(0).leg, ticket));
        let answer = Answer { ticket, refusal: Some(Refusal::Room) };
        assert_eq!(hear(&mut stream), Some(Reply::Answer(answer)));
    }
    assert_eq!((world.end.stats().slots, world.end.stats().dropped), (0, Bytes(50)));
}

/// Who holds a slot and says nothing is cut off; who holds none may be silent, and who waits for one is told so.
#[test]
fn silence() {
    let world = world(Duration::from_millis(200));
    let (mut holds, mut idle) = (world.dial(), world.dial());
    let (_one, _two) = (slot(&mut holds), slot(&mut holds));
    send(&mut idle, &Request::Ask);
    assert_eq!(hear(&mut idle), Some(Reply::Wait));
    assert_eq!(hear(&mut holds), None);
    // Both slots are fenced off: the agent is another one.
    let memory = loop {
        match hear(&mut idle).unwrap() {
            Reply::Wait => {}
            Reply::Memory(memory) => break memory,
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(hear(&mut idle), Some(Reply::Slot(slot)) if slot.era == memory.era && slot.era == 2));
    assert_eq!((world.end.stats().stalled, world.end.stats().renewed), (1, 1));
}

/// Memory of an agent that was closed is kept for writers that may still reach it, and they get no more; of an engine that is
/// the only one to write it, none is kept.
#[test]
fn closed_agents_keep_what_others_may_write() {
    for alone in [false, true] {
        let world = world_of(PATIENCE, alone);
        let mut refused = 0;
        for era in 1..=4 {
            let mut stream = world.dial();
            for _ in 0..2 {
                // What is refused is so at once.
                let _ = stream.write_all(&wire::tagged(&Request::Ask));
                let answer = loop {
                    match hear(&mut stream) {
                        Some(Reply::Wait | Reply::Memory(_)) => {}
                        answer => break answer,
                    }
                };
                match answer {
                    Some(Reply::Slot(slot)) if slot.era == era => {}
                    Some(Reply::Failed(_)) | None if !alone && era > 1 => refused += 1,
                    other => panic!("{alone} {era}: {other:?}"),
                }
            }
            drop(stream);
            if alone {
                world.until("fenced off", 0, 2);
            }
        }
        assert_eq!((refused > 0, world.end.stats().renewed), (!alone, if alone { 3 } else { 1 }));
    }
}

/// An engine that does not understand the peer's, or that hears nothing of it, serves no link, and says why.
#[test]
fn engines_that_do_not_meet() {
    let world = world(PATIENCE);
    let mut stream = world.opening(b"of another engine");
    assert!(matches!(hear(&mut stream), Some(Reply::Failed(why)) if why.contains("not mine")));
    let mut stream = world.opening(b"");
    assert!(matches!(hear(&mut stream), Some(Reply::Memory(_))));
    assert!(matches!(hear(&mut stream), Some(Reply::Failed(why)) if why.contains("does not arrive here")));
    assert_eq!(hear(&mut stream), None);
}
