//! Thousands of rooms, some of them given up, with peers that come and go: whoever stays must stay as it is.

use std::{
    sync::{
        Mutex, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use kvferry::server::{InstancePair, Leg, PairEvent, Problem};

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Fleet, Peer, Tokens, settled, wait_for_quiet, wait_for_same},
};

/// Rooms at a time.
const WORKERS: usize = 6;
/// What a process may grow by between the 200th and the last room, in KiB: the memory of ended rooms, which is
/// bounded, and what the allocator keeps.
const GROWTH: u64 = 3 << 10;

/// One place of the cluster; what is there may be replaced.
struct Place {
    peer: RwLock<Peer>,
    /// How often it was replaced; odd while it is being replaced.
    starts: AtomicU64,
}

impl Place {
    fn new(peer: Peer) -> Self {
        Self { peer: RwLock::new(peer), starts: AtomicU64::new(0) }
    }

    fn replace(&self, signal: &str) {
        self.starts.fetch_add(1, Ordering::SeqCst);
        self.peer.read().unwrap().signal(signal);
        let mut peer = self.peer.write().unwrap();
        if signal == "TERM" {
            wait_until("it has drained", || peer.server.child.try_wait().unwrap().is_some());
        }
        peer.restart();
        drop(peer);
        self.starts.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn two_thousand_rooms_leave_the_processes_flat_over_tcp() {
    churn("tcp");
}

#[test]
fn two_thousand_rooms_leave_the_processes_flat_over_shm() {
    churn("shm");
}

fn churn(transport: &str) {
    let rooms = std::env::var("KVFERRY_TEST_ROOMS").map_or(2000, |n| n.parse().unwrap());
    let fleet = Fleet::start();
    let mut alone = Alone::start();
    let start = |role: &str, name: &str, layout: &str| {
        Place::new(fleet.peer(role, name, &["--transport", transport, "--layout", layout, "--chunk", "8"]))
    };
    // Two that stay and two that do not, of both roles.
    let prefills = [start("prefill", "p0", "tp=2"), start("prefill", "p1", "tp=1,page=24")];
    let decodes = [start("decode", "d0", "tp=1"), start("decode", "d1", "tp=2,dcp=2,page=8")];
    let asks: Vec<(Ask, Tokens)> = (0..12)
        .map(|i| Ask::new(0, 5 + i * 3, 1 + i % 4))
        .map(|ask| (ask.clone(), alone.answer(&ask)))
        .collect();

    let done = AtomicUsize::new(0);
    let exact = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let work = |from: usize, to: usize| {
        let next = AtomicUsize::new(from);
        thread::scope(|scope| {
            for _ in 0..WORKERS {
                scope.spawn(|| {
                    loop {
                        let room = next.fetch_add(1, Ordering::Relaxed);
                        if room >= to {
                            return;
                        }
                        let pair = (&prefills[room % 2], &decodes[room / 2 % 2]);
                        match one(&fleet, room, &asks[room % asks.len()], pair) {
                            Ok(answered) => drop(exact.fetch_add(answered.into(), Ordering::Relaxed)),
                            Err(failure) => failures.lock().unwrap().push(failure),
                        }
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // One of those that come and go is struck in the middle of what runs.
            if from >= 200 {
                while done.load(Ordering::Relaxed) < from + (to - from) / 4 {
                    thread::sleep(Duration::from_millis(1));
                }
                let turn = from / 450;
                let victim = if turn.is_multiple_of(2) { &prefills[1] } else { &decodes[1] };
                victim.replace(if turn.is_multiple_of(3) { "TERM" } else { "KILL" });
            }
        });
    };
    let stay = || [&prefills[0], &decodes[0]].map(|place| place.peer.read().unwrap());
    let all = || prefills.iter().chain(&decodes).map(|place| place.peer.read().unwrap());

    work(0, 200);
    all().for_each(|peer| wait_for_quiet("after 200 rooms", &peer));
    let early = stay();
    let held = settled(early.iter().map(|peer| &**peer));
    let resident = early.map(|peer| peer.resident());
    let mut at = 200;
    while at < rooms {
        let to = (at + 450).min(rooms);
        work(at, to);
        at = to;
    }
    all().for_each(|peer| wait_for_quiet("at the end", &peer));
    // A room for each pair: all are connected again, and exact.
    for (i, (prefill, decode)) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().enumerate() {
        let pair = (&prefills[prefill], &decodes[decode]);
        assert!(one(&fleet, rooms + i * 7 + 7 - rooms % 7, &asks[i], pair).unwrap());
    }
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} rooms: {failures:#?}", failures.len());
    let exact = exact.into_inner();
    eprintln!("{exact} of {rooms} rooms were answered");
    assert!(exact >= rooms * 3 / 4, "{exact} of {rooms}");
    for ((peer, held), resident) in stay().iter().zip(held).zip(resident) {
        wait_for_same("at the end", peer, &held);
        let now = peer.resident();
        eprintln!("{}: {resident} KiB after 200 rooms, {now} KiB after {rooms}", peer.server.instance);
        assert!(now <= resident + GROWTH, "{}: {resident} KiB grew to {now}", peer.server.instance);
    }
}

/// One room; every seventh is given up by its clients somewhere on the way. Only a room with a place that was
/// replaced meanwhile may fail. True when it was answered, with exactly what is expected.
fn one(
    fleet: &Fleet,
    room: usize,
    asked: &(Ask, Tokens),
    (prefill, decode): (&Place, &Place),
) -> Result<bool, String> {
    let starts = || [prefill, decode].map(|place| place.starts.load(Ordering::SeqCst));
    let before = starts();
    let (ask, expected) = asked;
    let ask = Ask { room: room as u128 + 1, ..ask.clone() };
    let (pair, request) = {
        let (prefill, decode) = (prefill.peer.read().unwrap(), decode.peer.read().unwrap());
        let leg = |peer: &Peer| Leg { instance: peer.name(), client: peer.client() };
        (InstancePair { prefill: leg(&prefill), decode: leg(&decode) }, ask.to_decode(&prefill))
    };
    let whole = async {
        let (mut answer, mut tokens) = (pair.open(request).await?, Tokens::new());
        while let Some(event) = answer.next().await? {
            if let PairEvent::Token(token) = event {
                tokens.push((token.id, token.logprob.to_bits()));
            }
        }
        Ok::<_, Problem>(tokens)
    };
    let ended = if room % 7 == 3 {
        // At a different moment each time.
        let moment = Duration::from_micros((room as u64 * 7919) % 9000);
        match fleet.runtime.block_on(async { tokio::time::timeout(moment, whole).await }) {
            Ok(ended) => ended,
            Err(_) => return Ok(false),
        }
    } else {
        fleet.runtime.block_on(whole)
    };
    let replaced = before != starts() || before.iter().any(|n| n % 2 == 1);
    match ended {
        Ok(tokens) if tokens == *expected => Ok(true),
        Ok(tokens) => Err(format!("room {room}: {tokens:?} instead of {expected:?}")),
        Err(_) if replaced => Ok(false),
        Err(problem) => Err(format!("room {room}: {problem}")),
    }
}
