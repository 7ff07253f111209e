//! What no peer sends, on every port of real processes: it ends its own connection, is counted by cause, and the next
//! room is served.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    thread,
    time::Duration,
};

use kvferry::server::InstanceClient;
use serde_json::{Value, json};

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Fleet, run, settled, wait_for_same},
};

#[test]
fn ends_its_own_connection_over_tcp() {
    garbage("tcp");
}

#[test]
fn ends_its_own_connection_over_shm() {
    garbage("shm");
}

/// Sends it and waits until the other end has closed the connection.
fn insult(at: &str, bytes: &[u8], then: Then) {
    let patience = Some(Duration::from_secs(30));
    if let Some(name) = at.strip_prefix("shm://@") {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let mut stream = UnixStream::connect_addr(&address).unwrap();
        stream.set_read_timeout(patience).unwrap();
        say(&mut stream, bytes, |stream| {
            if then == Then::Leave {
                stream.shutdown(Shutdown::Write).unwrap();
            }
        });
    } else {
        let at = at.trim_start_matches("tcp://").trim_start_matches("http://");
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(patience).unwrap();
        say(&mut stream, bytes, |stream| {
            if then == Then::Leave {
                stream.shutdown(Shutdown::Write).unwrap();
            }
        });
    }
}

/// What a stranger does when it has spoken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Leave,
    Wait,
}

fn say<S: Read + Write>(stream: &mut S, bytes: &[u8], then: impl FnOnce(&mut S)) {
    // The other end may close before it has read everything, and that is an error here.
    let _ = stream.write_all(bytes);
    then(stream);
    let mut answer = [0; 4096];
    loop {
        match stream.read(&mut answer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the connection was not ended: {error}"),
        }
    }
}

fn noise() -> Vec<u8> {
    let mut x = 7_u64;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    };
    (0..500).flat_map(next).collect()
}

const HTTP: &[u8] = b"GET /v1/members HTTP/1.1\r\nHost: localhost\r\n\r\n";

fn garbage(transport: &str) {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    let start = |role, name| fleet.peer(role, name, &["--transport", transport]);
    let (prefill, decode) = (start("prefill", "prefill"), start("decode", "decode"));
    let mut room = |room| {
        let ask = Ask::new(room, 40, 4);
        assert_eq!(run(&fleet, &ask, &prefill, &decode).unwrap(), alone.answer(&ask));
    };
    room(1);
    let before = settled([&prefill, &decode]);

    let registry = &fleet.registry.url;
    let client = kvferry::registry::Client::new(registry).unwrap();
    let members = fleet.runtime.block_on(client.members()).unwrap();
    assert_eq!(members.len(), 2);
    let absurd = [&b"kvferry\x01"[..], &[0xff; 64]].concat();
    let half = [&b"kvferry\x01"[..], &[20, 0]].concat();
    let endless = "PUT /v1/members/x HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n[";
    thread::scope(|scope| {
        for member in &members {
            for (bytes, then) in [
                (&noise()[..], Then::Wait),
                (HTTP, Then::Wait),
                (&[0xff; 64], Then::Wait),
                (&[9, 0], Then::Leave),
                (&[9, 0, 0, 0, 0x82], Then::Leave),
            ] {
                insult(&member.control, bytes, then);
            }
            for (bytes, then) in
                [(&noise()[..], Then::Wait), (HTTP, Then::Wait), (&absurd, Then::Wait), (&half, Then::Leave)]
            {
                insult(&member.transports[0], bytes, then);
            }
            // Nothing at all.
            scope.spawn(|| insult(&member.control, &[], Then::Wait));
            scope.spawn(|| insult(&member.transports[0], &[], Then::Wait));
        }
        insult(registry, &noise(), Then::Wait);
        insult(registry, &absurd, Then::Wait);
        insult(registry, endless.as_bytes(), Then::Wait);
        insult(registry, b"PUT /v1/members/x HTTP/1.1\r\ncontent-", Then::Leave);
        scope.spawn(|| insult(registry, &[], Then::Wait));
    });

    let of = |cause: &str| format!("{transport}.{cause}");
    let expected = json!({
        "length": 3, "cut": 2, "silent": 1,
        of("malformed"): 2, of("length"): 1, of("cut"): 1, of("stalled"): 1,
    });
    for peer in [&prefill, &decode] {
        let broken = || peer.ledger().broken();
        wait_until(&format!("{} counts {expected}, not {}", peer.server.instance, broken()), || {
            broken() == expected
        });
    }
    let ledger = || -> Value {
        let client = InstanceClient::new(registry).unwrap();
        fleet.runtime.block_on(client.ledger()).unwrap()["broken"].take()
    };
    let expected = json!({ "cut": 1, "length": 1, "malformed": 2, "silent": 1 });
    wait_until(&format!("the registry counts {expected}, not {}", ledger()), || ledger() == expected);

    room(2);
    for (peer, before) in [&prefill, &decode].into_iter().zip(&before) {
        wait_for_same("after the garbage", peer, before);
    }
}
