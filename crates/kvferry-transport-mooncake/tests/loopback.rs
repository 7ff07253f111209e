//! Both roles against each other, and each against a peer that breaks the rules.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod memory;

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use kvferry_plan::{Blame, Bytes};
use kvferry_transport_mooncake::{
    Address, Description, Limits, MooncakeError, Notification, Peer, Read, Target, Write,
    wire::{Opcode, Request, STATUS, Status},
};
use memory::{BASE, Memory, pattern};
use proptest::prelude::*;

fn limits() -> Limits {
    Limits { stall: Duration::from_secs(20), connect: Duration::from_secs(20), ..Limits::default() }
}

fn start(memory: &Arc<Memory>, limits: Limits) -> Target {
    let ranges: Arc<Memory> = Arc::clone(memory);
    Target::start(Ipv4Addr::LOCALHOST.into(), ranges, limits).unwrap()
}

fn us() -> Description {
    Description { name: "127.0.0.1:1".into(), data_port: 1, version: 2, regions: Vec::new() }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}");
}

#[test]
fn a_target_is_found_probed_and_told_things() {
    let memory = Arc::new(Memory::new(4096));
    let target = start(&memory, limits());
    let peer = Peer::new(target.address(), limits()).unwrap();
    assert!(target.address().ip().is_loopback());
    peer.probe().unwrap();
    let theirs = peer.metadata(&us()).unwrap();
    assert_eq!(theirs, target.description());
    assert_eq!((theirs.version, theirs.regions), (2, vec![memory.region()]));
    let note = |message: &str| Notification { name: "test".into(), message: message.into() };
    peer.notify(&note("hello")).unwrap();
    assert_eq!(*memory.heard.lock().unwrap(), [note("hello")]);
    let unwanted = peer.notify(&note("unwanted")).unwrap_err();
    assert!(matches!(unwanted, MooncakeError::Rejected { .. }), "{unwanted}");
    target.close();
    let gone = peer.probe().unwrap_err();
    assert!(matches!(gone, MooncakeError::Gone { .. }), "{gone}");
    assert_eq!(gone.blame(), Blame::PeerMisbehaved);
}

/// Requests of all lengths, far more than the window, each where it belongs; also when answers and payloads together are
/// more than any socket buffer.
#[test]
fn many_requests_are_under_way() {
    for (window, count, len) in [(1, 50, 3), (7, 5000, 17), (1024, 20_000, 1), (256, 40, 1 << 20)] {
        let memory = Arc::new(Memory::new(count * len));
        let target = start(&memory, limits());
        let limits = Limits { window, ..limits() };
        let mut lane = Peer::new(target.address(), limits).unwrap().lane(&target.description()).unwrap();
        let bytes = pattern(31, count * len);
        let address = |i: usize| Address(BASE + (i * len) as u64);
        // Last first, so that they are no one long write.
        let writes: Vec<_> = bytes
            .chunks(len)
            .enumerate()
            .rev()
            .map(|(i, bytes)| Write { address: address(i), bytes })
            .collect();
        lane.write(&writes).unwrap();
        assert!(memory.bytes() == bytes);
        let mut back = vec![0; count * len];
        let mut reads: Vec<_> =
            back.chunks_mut(len).enumerate().map(|(i, into)| Read { address: address(i), into }).collect();
        lane.read(&mut reads).unwrap();
        assert!(back == bytes);
        let all = Bytes((count * len) as u64);
        // What is served is counted once it has been sent, which its reader may be earlier than.
        let since = Instant::now();
        while target.stats().served != all && since.elapsed() < Duration::from_secs(10) {
            thread::yield_now();
        }
        let stats = target.stats();
        assert_eq!((stats.landed, stats.served, stats.refused), (all, all, 0));
    }
}

#[test]
fn nothing_is_no_request() {
    let memory = Arc::new(Memory::new(8));
    let target = start(&memory, limits());
    let mut lane = Peer::new(target.address(), limits()).unwrap().lane(&target.description()).unwrap();
    lane.write(&[]).unwrap();
    lane.write(&[Write { address: Address(0), bytes: &[] }, Write { address: Address(BASE), bytes: &[9] }])
        .unwrap();
    lane.read(&mut [Read { address: Address(0), into: &mut [] }]).unwrap();
    assert_eq!(memory.bytes()[..2], [9, 0]);
}

/// A request that is not inside one range is refused as a whole; what was acknowledged before stays.
#[test]
fn what_is_not_granted_is_refused() {
    let memory = Arc::new(Memory::new(64));
    let target = start(&memory, limits());
    let peer = Peer::new(target.address(), limits()).unwrap();
    let cases = [(BASE - 1, 2), (BASE + 63, 2), (BASE + 64, 1), (0, 1), (u64::MAX, 1), (BASE, 65)];
    for (refusals, (address, len)) in (1..).zip(cases) {
        let bytes = vec![0xff; len];
        let mut lane = peer.lane(&target.description()).unwrap();
        let fine = Write { address: Address(BASE), bytes: &[1] };
        let refused = lane.write(&[fine, Write { address: Address(address), bytes: &bytes }]).unwrap_err();
        let MooncakeError::Refused { address: at, len: bytes, .. } = refused else { panic!("{refused}") };
        assert_eq!((at, bytes), (Address(address), Bytes(len as u64)));
        let closed = lane.write(&[fine]).unwrap_err();
        assert!(matches!(closed, MooncakeError::Closed { .. }), "{closed}");
        let mut lane = peer.lane(&target.description()).unwrap();
        let refused = lane.read(&mut [Read { address: Address(address), into: &mut vec![0; len] }]);
        assert!(matches!(refused, Err(MooncakeError::Refused { .. })), "{refused:?}");
        until("refusals are not counted", || target.stats().refused == 2 * refusals);
    }
    let mut expected = vec![0; 64];
    expected[0] = 1;
    assert_eq!(memory.bytes(), expected);
}

/// A refused write of any length, in a long pipeline: the initiator hears which one it was.
#[test]
fn a_refusal_is_heard_behind_megabytes() {
    let memory = Arc::new(Memory::new(4 << 20));
    let target = start(&memory, limits());
    let mut lane = Peer::new(target.address(), limits()).unwrap().lane(&target.description()).unwrap();
    let bytes = pattern(3, 1 << 20);
    let at = |address| Write { address: Address(address), bytes: &bytes };
    let outside = BASE + (3 << 20) + 1;
    let refused = lane.write(&[at(BASE), at(outside), at(BASE), at(BASE), at(BASE)]).unwrap_err();
    assert!(
        matches!(refused, MooncakeError::Refused { address: Address(a), .. } if a == outside),
        "{refused}"
    );
}

/// What is revoked while it is written is refused, and no more of it lands.
#[test]
fn a_revoked_range_takes_nothing_more() {
    let memory = Arc::new(Memory { lands: 1 << 20, ..Memory::new(4 << 20) });
    let target = start(&memory, limits());
    let peer = Peer::new(target.address(), limits()).unwrap();
    let mut lane = peer.lane(&target.description()).unwrap();
    let bytes = vec![1; 4 << 20];
    let refused = lane.write(&[Write { address: Address(BASE), bytes: &bytes }]).unwrap_err();
    assert!(matches!(refused, MooncakeError::Refused { .. }), "{refused}");
    assert!(memory.bytes()[2 << 20..].iter().all(|byte| *byte == 0));
    memory.revoked.store(true, Ordering::Release);
    let before = memory.bytes();
    let mut lane = peer.lane(&target.description()).unwrap();
    assert!(lane.write(&[Write { address: Address(BASE), bytes: &[9] }]).is_err());
    assert!(memory.bytes() == before);
}

/// Connections over the bound are closed at once; those that say nothing end, and make room.
#[test]
fn connections_are_bounded() {
    let memory = Arc::new(Memory::new(64));
    let short = Duration::from_millis(50);
    let target = start(&memory, Limits { connections: 2, idle: short, stall: short, ..limits() });
    let data = SocketAddr::from((Ipv4Addr::LOCALHOST, target.description().data_port));
    // The first says nothing and the second not all.
    let mut silent = TcpStream::connect(data).unwrap();
    let mut halting = TcpStream::connect(data).unwrap();
    halting.write_all(&[1, 0, 0]).unwrap();
    let mut third = TcpStream::connect(data).unwrap();
    let mut byte = [0];
    for stream in [&mut silent, &mut halting, &mut third] {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert!(matches!(stream.read(&mut byte), Ok(0) | Err(_)));
    }
    let peer = Peer::new(target.address(), limits()).unwrap();
    until("no room was made", || {
        let mut lane = peer.lane(&target.description()).unwrap();
        lane.write(&[Write { address: Address(BASE), bytes: &[1] }]).is_ok()
    });
    assert!(target.stats().ended >= 1);
}

/// A peer that hangs costs the stall limit, whether it never took the request or never answers it.
#[test]
fn a_hanging_target_is_given_up() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let limits =
        Limits { stall: Duration::from_millis(100), connect: Duration::from_millis(100), ..limits() };
    let peer = Peer::new(listener.local_addr().unwrap(), limits).unwrap();
    let stalled = peer.probe().unwrap_err();
    assert!(matches!(stalled, MooncakeError::Stalled { .. }), "{stalled}");
    for len in [1, 64 << 20] {
        let mut lane = peer.lane(&Description { data_port: port, ..us() }).unwrap();
        let bytes = vec![0; len];
        let stalled = lane.write(&[Write { address: Address(BASE), bytes: &bytes }]).unwrap_err();
        assert!(matches!(stalled, MooncakeError::Stalled { .. }), "{stalled}");
    }
}

/// Answers one control message with each of these.
fn answering(answers: impl IntoIterator<Item = Vec<u8>> + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut len = [0; 8];
            stream.read_exact(&mut len).unwrap();
            let mut rest = vec![0; u64::from_le_bytes(len) as usize];
            stream.read_exact(&mut rest).unwrap();
            // The other end may have had enough.
            let _ = stream.write_all(&answer);
        }
    });
    address
}

fn message(kind: u8, json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend(json.bytes());
    bytes
}

#[test]
fn odd_answers_are_named() {
    let old = message(1, r#"{"name":"a","protocol":"tcp","tcp_data_port":9,"buffers":[]}"#);
    let rdma = message(1, r#"{"name":"a","protocol":"rdma","buffers":[]}"#);
    let mut long = u64::MAX.to_le_bytes().to_vec();
    long.push(1);
    for (answer, said) in [
        (old, "speaks version 1 of the TCP protocol"),
        (rdma, "its memory is reached by `rdma`, not by `tcp`"),
        (message(1, "{"), "its description is damaged"),
        (message(2, "{}"), "it answers Metadata with Notify"),
        (message(0, "{}"), "a message of a kind that TCP peers do not send"),
        (long, "a message of an impossible length"),
        (vec![1, 2], "is gone"),
        (vec![], "is gone"),
    ] {
        let peer = Peer::new(answering([answer]), limits()).unwrap();
        let error = peer.metadata(&us()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// An engine listens before it can say what it has: it is asked again, but not for ever.
#[test]
fn an_engine_that_starts_is_asked_again() {
    let null = || message(1, "null\n");
    let ready = r#"{"name":"a","protocol":"tcp","tcp_data_port":9,"tcp_proto_version":2,"buffers":[]}"#;
    let peer = Peer::new(answering([null(), null(), message(1, ready)]), limits()).unwrap();
    assert_eq!(peer.metadata(&us()).unwrap().data_port, 9);
    let limits = Limits { connect: Duration::from_secs(1), ..limits() };
    let peer = Peer::new(answering(std::iter::repeat_with(null)), limits).unwrap();
    let since = Instant::now();
    let never = peer.metadata(&us()).unwrap_err();
    assert!(matches!(never, MooncakeError::NotReady { .. }), "{never}");
    assert_eq!(never.blame(), Blame::PeerMisbehaved);
    assert!(since.elapsed() < Duration::from_secs(10));
}

#[test]
fn other_machines_are_none_of_ours() {
    let there = SocketAddr::from(([192, 0, 2, 1], 15000));
    assert!(matches!(Peer::new(there, limits()), Err(MooncakeError::NotLoopback { .. })));
    let all = Target::start(Ipv4Addr::UNSPECIFIED.into(), Arc::new(Memory::new(1)), limits());
    assert!(matches!(all, Err(MooncakeError::NotLoopback { .. })));
}

/// An initiator that expects no acknowledgements gets nothing landed.
#[test]
fn the_first_version_is_refused() {
    let memory = Arc::new(Memory::new(64));
    let target = start(&memory, limits());
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, target.description().data_port)).unwrap();
    let request = Request { opcode: Opcode::Write, address: Address(BASE), len: Bytes(1), status: false };
    stream.write_all(&request.encode()).unwrap();
    stream.write_all(&[1]).unwrap();
    assert_eq!(stream.read(&mut [0; STATUS]).unwrap(), 0);
    assert_eq!((target.stats().refused, memory.bytes()[0]), (1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever comes over the data port, cut wherever, a target goes on serving others; and only granted bytes change.
    #[test]
    fn hostile_requests(
        requests in prop::collection::vec(
            (any::<[u8; 24]>(), prop::bool::weighted(0.7), 0_u64..80, 0_u64..40, any::<bool>()), 1..6),
        cuts in prop::collection::vec(1_usize..60, 0..6),
    ) {
        let memory = Arc::new(Memory::new(64));
        let target = start(&memory, Limits { stall: Duration::from_millis(200), ..limits() });
        let mut expected = vec![0; 64];
        let mut bytes = Vec::new();
        let mut good = true;
        for (i, (noise, sane, at, len, write)) in (1..).zip(requests) {
            if !sane {
                bytes.extend(noise);
                // It may be any request, also one that waits for more.
                break;
            }
            let opcode = if write { Opcode::Write } else { Opcode::Read };
            let request = Request { opcode, address: Address(BASE + at), len: Bytes(len), status: true };
            bytes.extend(request.encode());
            if write {
                bytes.extend(vec![i; len as usize]);
            }
            good &= len > 0 && at + len <= 64;
            if good && write {
                expected[at as usize..(at + len) as usize].fill(i);
            }
        }
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, target.description().data_port)).unwrap();
        let mut rest = &bytes[..];
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            let _ = stream.write_all(now);
            rest = later;
        }
        let _ = stream.write_all(rest);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        prop_assert_eq!(memory.bytes(), expected);
        let mut lane = Peer::new(target.address(), limits()).unwrap().lane(&target.description()).unwrap();
        lane.write(&[Write { address: Address(BASE), bytes: &[200] }]).unwrap();
        prop_assert_eq!(memory.bytes()[0], 200);
    }

    /// Whatever comes over the control port, a target goes on answering.
    #[test]
    fn hostile_messages(
        len in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
        rest in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let memory = Arc::new(Memory::new(64));
        let target = start(&memory, Limits { connect: Duration::from_millis(200), ..limits() });
        let mut stream = TcpStream::connect(target.address()).unwrap();
        let _ = stream.write_all(&len.unwrap_or(rest.len() as u64).to_le_bytes());
        let _ = stream.write_all(&rest);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        Peer::new(target.address(), limits()).unwrap().probe().unwrap();
    }
}

/// What answers a lane is a status or an error of the peer.
#[test]
fn nonsense_for_a_status() {
    for (answer, refused) in [([7; STATUS], false), (Status::Refused.encode(), true)] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let peer = Peer::new(address, limits()).unwrap();
        let mut lane = peer.lane(&Description { data_port: address.port(), ..us() }).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        theirs.write_all(&answer).unwrap();
        let error = lane.write(&[Write { address: Address(BASE), bytes: &[1] }]).unwrap_err();
        match error {
            MooncakeError::Refused { .. } => assert!(refused),
            MooncakeError::Protocol { .. } => assert!(!refused),
            other => panic!("{other}"),
        }
    }
}
