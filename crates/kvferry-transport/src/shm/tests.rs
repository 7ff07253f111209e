//! What comes over the socket from somebody who does not follow the protocol, in both directions.

use std::{
    io::{Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, ArenaError};
use kvferry_plan::{
    Blame, CacheShape, Descriptor, Dtype, Incarnation, PROTOCOL, Placement, PoolLayout, RankId,
};

use super::{Shm, fds};
use crate::{
    PeerAddr, Registration, Setup, Transport, TransportError,
    socket::{Lost, Socket},
    wire::{self, Hello},
};

const US: Incarnation = Incarnation { started_ms: 1, nonce: 1 };
const PEER: Incarnation = Incarnation { started_ms: 2, nonce: 2 };
const PATIENCE: Duration = Duration::from_secs(20);

fn descriptor() -> Descriptor {
    let shape = CacheShape::mla(1, 4);
    let placement = Placement::single(&shape, 16, Dtype::Bf16);
    Descriptor { protocol: PROTOCOL, model: "m".into(), shape, placement, converts: false }
}

fn arena(pages: u32) -> Arena {
    let d = descriptor();
    Arena::new("test", PoolLayout::new(&d.shape, &d.placement, RankId(0), pages).unwrap()).unwrap()
}

fn address(endpoint: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(endpoint.strip_prefix("shm://@").unwrap()).unwrap()
}

fn connect(end: &Shm) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect_addr(&address(&end.endpoint()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

#[test]
fn the_name_goes_with_the_end() {
    let end = Shm::new(Setup::new(US)).unwrap();
    let address = address(&end.endpoint());
    assert!(address.as_pathname().is_none(), "no file that could stay behind");
    drop(connect(&end).unwrap());
    drop(end);
    assert!(UnixStream::connect_addr(&address).is_err());
}

/// Only root can become somebody else: without it there is nothing to see here.
#[test]
fn another_user_gets_no_memory_and_is_given_none() {
    use rustix::{process::Uid, process::geteuid, thread::set_thread_res_uid};
    if !geteuid().is_root() {
        return;
    }
    let end = Shm::new(Setup::new(US)).unwrap();
    end.register(RankId(0), Registration::host(Arc::new(arena(4)))).unwrap();
    // Of this thread only.
    let become_nobody = || {
        let nobody = Uid::from_raw(65534);
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
    };
    let answer = thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            become_nobody();
            let mut stream = connect(&end).unwrap();
            let hello = Hello { version: wire::VERSION, from: PEER, to: US, ranks: None };
            // It may be turned away before it has spoken.
            let _ = stream.write_all(&wire::hello(&hello));
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        });
        stranger.join().unwrap()
    });
    assert_eq!(answer, []);
    let since = Instant::now();
    while end.stats().turned_away == 0 {
        assert!(since.elapsed() < PATIENCE, "{:?}", end.stats());
        thread::sleep(Duration::from_millis(1));
    }

    // And a source that somebody else runs under that name is not read.
    let name = "shm://@kvferry-test-of-another-user";
    let peer = PeerAddr { endpoint: name.into(), incarnation: PEER, descriptor: Arc::new(descriptor()) };
    let listening = thread::spawn(move || {
        become_nobody();
        UnixListener::bind_addr(&address(name)).unwrap()
    });
    let _listener = listening.join().unwrap();
    let error = end.open(&peer).unwrap_err();
    assert!(error.to_string().contains("another user"), "{error}");
    assert_eq!(error.blame(), Blame::PeerMisbehaved);
}

#[test]
fn strangers_get_no_memory() {
    let end = Shm::new(Setup::new(US)).unwrap();
    end.register(RankId(0), Registration::host(Arc::new(arena(4)))).unwrap();
    let hello = |to| wire::hello(&Hello { version: wire::VERSION, from: PEER, to, ranks: None });
    let mut chatter = hello(US);
    chatter.extend(b"and more");
    let strangers: [&[u8]; 3] = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", &[0xff; 4096], &chatter];
    for bytes in strangers {
        let mut stream = connect(&end).unwrap();
        stream.write_all(bytes).unwrap();
        // Reads to the end: an answer if there was a hello, then the end of the connection.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer.is_empty(), bytes[0] != wire::MAGIC[0]);
    }
    let since = Instant::now();
    while end.stats().malformed < 3 || end.stats().connections > 0 {
        assert!(since.elapsed() < PATIENCE, "{:?}", end.stats());
        thread::sleep(Duration::from_millis(1));
    }
    // Who means another start gets an answer and no descriptor.
    let socket = Socket::new(connect(&end).unwrap(), PATIENCE).unwrap();
    let error = socket.greet(PEER, PEER, PATIENCE, "here").unwrap_err();
    assert!(matches!(error, TransportError::Restarted { found: US, .. }), "{error}");
    assert!(matches!(socket.fill(&mut [0], false), Err(Lost::Closed)));
    assert_eq!(end.stats().turned_away, 1);
}

/// A source that answers `open` with `serve`.
fn open(serve: impl FnOnce(Socket) + Send) -> TransportError {
    let end = Shm::new(Setup::new(US)).unwrap();
    let endpoint = format!("{}-liar", end.endpoint());
    let listener = UnixListener::bind_addr(&address(&endpoint)).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            serve(Socket::new(stream, PATIENCE).unwrap());
        });
        let peer = PeerAddr { endpoint, incarnation: PEER, descriptor: Arc::new(descriptor()) };
        let error = end.open(&peer).unwrap_err();
        assert_eq!(error.blame(), Blame::PeerMisbehaved, "{error}");
        assert_eq!(end.stats().links, 0);
        error
    })
}

#[test]
fn a_source_that_lies_is_refused() {
    let welcome = |socket: &Socket, ranks| {
        socket.welcome(PEER, Some(ranks), PATIENCE).unwrap();
    };
    // More ranks than its layout has.
    let error = open(|socket| welcome(&socket, 2));
    assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
    // A rank without memory.
    let error = open(|socket| {
        welcome(&socket, 1);
        socket.send(&[0; fds::RECORD], &[]).unwrap();
    });
    assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
    // Half a rank.
    let error = open(|socket| {
        welcome(&socket, 1);
        socket.send(&[0; 3], &[]).unwrap();
    });
    assert!(matches!(error, TransportError::PeerGone { .. }), "{error}");
    // A rank that its layout does not have.
    let error = open(|socket| {
        welcome(&socket, 1);
        fds::send(&socket, RankId(7), &arena(4)).unwrap();
    });
    assert!(matches!(error, TransportError::Protocol { .. }), "{error}");
    // Memory of another layout.
    let shape = CacheShape::mla(9, 400);
    let place = Placement::single(&shape, 16, Dtype::Bf16);
    let other = Arena::new("other", PoolLayout::new(&shape, &place, RankId(0), 4).unwrap()).unwrap();
    let error = open(|socket| {
        welcome(&socket, 1);
        fds::send(&socket, RankId(0), &other).unwrap();
    });
    assert!(matches!(error, TransportError::Arena(ArenaError::Size { .. })), "{error}");
    // Silence is not waited for.
    let since = Instant::now();
    let error = open(|socket| {
        let _ = socket.fill(&mut [0; 4096], true);
    });
    assert!(matches!(error, TransportError::PeerGone { .. } | TransportError::Stalled { .. }), "{error}");
    assert!(since.elapsed() < PATIENCE);
}
