//! The engine for landing slots: what it lets others write, and when.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};

use kvferry_arena::Buffer;
use kvferry_plan::Bytes;
use kvferry_transport::{
    DeviceId, MemoryKind,
    slots::{BlockEngine, BlockSpan, EngineError, EnginePeer, Progress},
};
use kvferry_transport_mooncake::{
    Address, Description, Limits, MooncakeEngine, MooncakeError, Peer, Read, Write,
};

const LEN: u64 = 4096;

struct End {
    engine: MooncakeEngine,
    memory: Arc<Buffer>,
    span: BlockSpan,
}

impl End {
    fn start() -> Self {
        Self::with(LEN)
    }

    fn with(len: u64) -> Self {
        let mut engine = MooncakeEngine::new(Ipv4Addr::LOCALHOST.into(), Limits::default()).unwrap();
        let memory = Arc::new(Buffer::new("test", Bytes(len)).unwrap());
        let span = engine.register(Arc::clone(&memory), MemoryKind::Host, DeviceId(0)).unwrap();
        Self { engine, memory, span }
    }

    fn filled(&self) -> u64 {
        let mut bytes = vec![0; LEN as usize];
        self.memory.read(Bytes(0), &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == 7).count() as u64
    }

    fn write(&mut self, peer: EnginePeer, to: BlockSpan) -> Result<(), EngineError> {
        let from = self.span.part(Bytes(0), to.len).unwrap();
        let write = self.engine.write(peer, from, to)?;
        loop {
            match self.engine.poll(write) {
                Ok(Progress::Moving) => thread::sleep(Duration::from_millis(1)),
                outcome => {
                    self.engine.release(write);
                    return outcome.map(drop);
                }
            }
        }
    }
}

/// A slot takes a write while it is open, and no other memory does; the source goes on after a refusal.
#[test]
fn only_open_slots_are_written() {
    let (mut source, mut target) = (End::start(), End::start());
    source.memory.write(Bytes(0), &[7; LEN as usize]).unwrap();
    let gate = target.engine.gate().unwrap();
    let part = |at, len| target.span.part(Bytes(at), Bytes(len)).unwrap();
    let peer = source.engine.connect(&target.engine.metadata().unwrap()).unwrap();
    assert!(source.write(peer, part(0, 1024)).is_err());
    gate.open(part(1024, 1024));
    gate.open(part(1024, 1024));
    for (at, len) in [(0, 1024), (1000, 100), (1024, 1025), (2048, 1), (0, LEN)] {
        assert!(source.write(peer, part(at, len)).is_err(), "{len} bytes at {at}");
        assert_eq!(target.filled(), 0);
    }
    source.write(peer, part(1024, 1024)).unwrap();
    source.write(peer, part(2000, 48)).unwrap();
    assert_eq!(target.filled(), 1024);
    gate.shut(part(1024, 1024));
    target.memory.write(Bytes(0), &[0; LEN as usize]).unwrap();
    assert!(source.write(peer, part(1024, 1024)).is_err());
    assert_eq!(target.filled(), 0);
    // The staging of the source was open to nobody.
    let back = target.engine.connect(&source.engine.metadata().unwrap()).unwrap();
    let theirs = source.span;
    assert!(target.write(back, theirs).is_err());
    assert_eq!(source.filled(), LEN);
}

/// A block that is long is received straight into its slot: byte for byte, next to others, and nothing of it once the slot is
/// shut.
#[test]
fn long_blocks_land_in_open_slots_only() {
    const LONG: u64 = 8 << 20;
    let (mut source, mut target) = (End::with(LONG), End::with(LONG));
    let noise: Vec<u8> = (0..LONG).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    source.memory.write(Bytes(0), &noise).unwrap();
    let gate = target.engine.gate().unwrap();
    let peer = source.engine.connect(&target.engine.metadata().unwrap()).unwrap();
    let landed = |target: &End| {
        let mut bytes = vec![0; LONG as usize];
        target.memory.read(Bytes(0), &mut bytes).unwrap();
        bytes
    };
    // Lengths around those from which on nothing goes through a buffer.
    let mut at = 0;
    for len in [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, (1 << 20) + 77, 5] {
        let slot = target.span.part(Bytes(at), Bytes(len)).unwrap();
        gate.open(slot);
        source.write(peer, slot).unwrap();
        gate.shut(slot);
        at += len + 3;
        let all = landed(&target);
        let (from, to) = ((at - len - 3) as usize, (at - 3) as usize);
        assert!(all[from..to] == noise[..len as usize], "{len} bytes");
        assert!(all[to..].iter().all(|byte| *byte == 0), "{len} bytes");
    }
    // Shut in the middle: what is there then stays as it is, and the source hears that it was refused, or that all had come.
    for round in 0..20 {
        target.memory.write(Bytes(0), &vec![0; LONG as usize]).unwrap();
        gate.open(target.span);
        let write = source.engine.write(peer, source.span, target.span).unwrap();
        thread::sleep(Duration::from_micros(150 * round));
        gate.shut(target.span);
        let then = landed(&target);
        while let Ok(Progress::Moving) = source.engine.poll(write) {
            thread::sleep(Duration::from_millis(1));
        }
        let all = source.engine.poll(write).is_ok();
        source.engine.release(write);
        assert!(landed(&target) == then, "round {round}: it was written after it was shut");
        assert_eq!(then == noise, all, "round {round}");
    }
}

/// Who merely asks hears of no memory, and nothing can be read.
#[test]
fn strangers_learn_nothing() {
    let mut target = End::start();
    target.engine.gate().unwrap().open(target.span);
    let control: SocketAddr = String::from_utf8(target.engine.metadata().unwrap()).unwrap().parse().unwrap();
    let peer = Peer::new(control, Limits::default()).unwrap();
    let us = Description { name: "127.0.0.1:1".into(), data_port: 1, version: 2, regions: Vec::new() };
    let theirs = peer.metadata(&us).unwrap();
    assert!(theirs.regions.is_empty());
    let at = Address(target.span.address);
    peer.lane(&theirs).unwrap().write(&[Write { address: at, bytes: &[7] }]).unwrap();
    let read = peer.lane(&theirs).unwrap().read(&mut [Read { address: at, into: &mut [0] }]);
    assert!(matches!(read, Err(MooncakeError::Refused { .. })), "{read:?}");
}

/// What names no peer or no memory of ours is an error at once, and so is a peer of another machine.
#[test]
fn nonsense_is_refused() {
    let mut end = End::start();
    let (span, nobody) = (end.span, EnginePeer(99));
    assert!(end.engine.write(nobody, span, span).is_err());
    assert!(end.engine.notify(nobody, b"x").is_err());
    for metadata in [&b"nonsense"[..], b"", b"192.0.2.1:15000", &[0xff]] {
        assert!(end.engine.connect(metadata).is_err());
    }
    let metadata = end.engine.metadata().unwrap();
    let peer = end.engine.connect(&metadata).unwrap();
    let outside = BlockSpan { address: span.address + 1, ..span };
    assert!(end.engine.write(peer, outside, span).is_err());
    assert!(end.engine.write(peer, span, span.part(Bytes(0), Bytes(1)).unwrap()).is_err());
    assert!(end.engine.notify(peer, &[0xff]).is_err());
    end.engine.disconnect(peer);
    assert!(end.engine.write(peer, span, span).is_err());
}
