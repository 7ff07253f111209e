//! What cannot be served, on either side: the request fails at both ends, at once, with the axis and what to change;
//! what runs between others goes on and stays exact.

use std::{
    fmt::Display,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use kvferry::{
    plan::{Blame, Descriptor, RankId, TokenMap},
    registry::Role,
    server::{DecodeRequest, Stage},
};

use crate::{
    common::wait_until,
    fleet::{
        Alone, Ask, Fleet, Flight, Peer, collect, run, settled, start_prefill, wait_for_quiet, wait_for_same,
    },
    stranger::Stranger,
};

/// Far below the time that one side waits for the other to come (10 s).
const BOUND: Duration = Duration::from_secs(5);

/// Prompts of the pair that is served all the time.
const LENGTHS: [u32; 3] = [40, 90, 200];

/// What one side was told, and how long after the request.
struct Told {
    text: String,
    blame: Blame,
    after: Duration,
}

impl Told {
    fn new(error: &impl Display, blame: Blame, after: Duration) -> Self {
        Self { text: error.to_string(), blame, after }
    }
}

/// Both sides have been told the same, soon.
fn check(what: &str, axis: &str, change: &str, sides: [Told; 2]) {
    for side in &sides {
        assert!(
            side.text.contains(&format!("`{axis}`")) && side.text.contains(change),
            "{what}: {}",
            side.text
        );
        assert_eq!(side.blame, Blame::PeerIncompatible, "{what}: {}", side.text);
        assert!(side.after < BOUND, "{what}: {:?}: {}", side.after, side.text);
    }
    let [decode, prefill] = sides.map(|side| side.after.as_secs_f64() * 1e3);
    eprintln!("{what}: told {decode:.0} ms after the request at decode, {prefill:.0} ms at prefill");
}

/// Two processes, of which one is a misfit.
fn refused(fleet: &Fleet, ask: &Ask, prefill: &Peer, decode: &Peer) -> [Told; 2] {
    let since = Instant::now();
    let Flight { prefill: prefilling, decode: decoding, .. } =
        Flight::start(&fleet.runtime, ask, prefill, decode);
    let (decoded, at) = fleet.runtime.block_on(decoding).unwrap();
    let problem = decoded.map(drop).unwrap_err();
    assert_eq!(problem.stage, Stage::HandOff, "{problem}");
    let at_decode = Told::new(&problem, problem.blame, at - since);
    let (prefilled, at) = fleet.runtime.block_on(prefilling).unwrap();
    let problem = prefilled.map(drop).unwrap_err();
    for peer in [prefill, decode] {
        gone(fleet, ask, peer);
    }
    [at_decode, Told::new(&problem, problem.blame, at - since)]
}

/// A decode that only this process can make.
fn refused_decode(fleet: &Fleet, ask: &Ask, prefill: &Peer, stranger: &Stranger<'_>) -> [Told; 2] {
    let since = Instant::now();
    let (receiving, waits) = (stranger.receive(ask, prefill), start_prefill(&fleet.runtime, ask, prefill));
    let error = fleet.runtime.block_on(receiving.outcome()).unwrap_err();
    let at_decode = Told::new(&error, error.blame(), since.elapsed());
    let (prefilled, at) = fleet.runtime.block_on(waits).unwrap();
    let problem = prefilled.map(drop).unwrap_err();
    gone(fleet, ask, prefill);
    [at_decode, Told::new(&problem, problem.blame, at - since)]
}

/// A prefill that only this process can make.
fn refused_prefill(fleet: &Fleet, ask: &Ask, stranger: &Stranger<'_>, decode: &Peer) -> [Told; 2] {
    let since = Instant::now();
    let sending = stranger.send(ask);
    let request = DecodeRequest { prefill: stranger.name(), ..ask.to_decode(decode) };
    let problem =
        fleet.runtime.block_on(collect(&decode.client(), &request, None, None)).map(drop).unwrap_err();
    let at_decode = Told::new(&problem, problem.blame, since.elapsed());
    let error = fleet.runtime.block_on(sending.outcome()).unwrap_err();
    gone(fleet, ask, decode);
    [at_decode, Told::new(&error, error.blame(), since.elapsed())]
}

/// Nothing of the room is left, on any rank.
fn gone(fleet: &Fleet, ask: &Ask, peer: &Peer) {
    for rank in [RankId(0), RankId(1)] {
        let kept = || fleet.runtime.block_on(peer.client().kv(ask.key(), rank));
        wait_until("the room is forgotten", || {
            kept().is_err_and(|problem| problem.cause.contains("not known"))
        });
    }
}

#[test]
fn requests_fail_at_once_on_both_sides_and_other_peers_go_on() {
    let (fleet, mut alone) = (Fleet::start(), Alone::start());
    let layout = ["--layout", "tp=2,page=16", "--chunk", "16"];
    let (prefill, decode) =
        (fleet.peer("prefill", "prefill", &layout), fleet.peer("decode", "decode", &layout));
    let ask = |room, length| Ask::new(room, length, 5);
    let right = LENGTHS.map(|length| alone.answer(&ask(1, length)));
    assert_eq!(run(&fleet, &ask(1, LENGTHS[0]), &prefill, &decode).unwrap(), right[0]);
    let before = settled([&prefill, &decode]);

    let done = AtomicBool::new(false);
    let served = thread::scope(|scope| {
        let stream = scope.spawn(|| {
            let mut rooms = 0;
            while !done.load(Ordering::Relaxed) {
                let i = rooms % LENGTHS.len();
                let ask = ask(1000 + rooms as u128, LENGTHS[i]);
                assert_eq!(run(&fleet, &ask, &prefill, &decode).unwrap(), right[i], "room {}", ask.room);
                rooms += 1;
            }
            rooms
        });
        let misfits = || each_misfit(&fleet, &prefill, &decode);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(misfits));
        done.store(true, Ordering::Relaxed);
        let served = stream.join().unwrap();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served
    });
    eprintln!("{served} rooms of the good pair meanwhile");
    assert!(served > 0);
    for (peer, before) in [&prefill, &decode].into_iter().zip(&before) {
        wait_for_quiet("at the end", peer);
        wait_for_same("after all", peer, before);
    }
}

/// Tries what cannot be served, on each side.
fn each_misfit(fleet: &Fleet, prefill: &Peer, decode: &Peer) {
    // In every model's vocabulary.
    let ask = |room| Ask { prompt: (1..=60).collect(), ..Ask::new(room, 60, 5) };
    let layout = ["--layout", "tp=2,page=16"];
    let of_binary = |role: &str| {
        let other = |name: &str, more: &[&str]| {
            fleet.peer(role, &format!("{role}-{name}"), &[&layout, more].concat())
        };
        [
            ("element type", "key.dtype", "same element type", other("bf16", &["--kv-dtype", "bf16"])),
            (
                "arithmetic",
                "model",
                "same weights, attention form and arithmetic",
                other("fast", &["--arith", "fast"]),
            ),
            ("form of attention", "parts", "same model", other("mla", &["--attention", "mla"])),
            (
                "model",
                "parts",
                "same model",
                fleet.peer_of("embedded:needle_kimi", role, &format!("{role}-kimi"), &layout),
            ),
        ]
    };
    for (room, (what, axis, change, misfit)) in (10..).zip(of_binary("decode")) {
        let told = refused(fleet, &ask(room), prefill, &misfit);
        check(&format!("decode with another {what}"), axis, change, told);
        wait_for_quiet("refused", &misfit);
    }
    for (room, (what, axis, change, misfit)) in (20..).zip(of_binary("prefill")) {
        let told = refused(fleet, &ask(room), &misfit, decode);
        check(&format!("prefill with another {what}"), axis, change, told);
        wait_for_quiet("refused", &misfit);
    }

    let dcp = |d: &mut Descriptor| {
        d.placement.host_pages = Some(1000);
        let parts = &mut d.placement.parts;
        parts.iter_mut().for_each(|part| part.tokens = TokenMap::Interleaved { ranks: 2, interleave: 1 });
    };
    let cp = |d: &mut Descriptor| d.placement.cp = 2;
    let start =
        |role, name, change: &dyn Fn(&mut Descriptor)| Stranger::start(fleet, (role, name), prefill, change);

    let stranger = start(Role::Decode, "decode-cp", &cp);
    let told = refused_decode(fleet, &ask(30), prefill, &stranger);
    check("decode with cp 2", "context parallel", "1 is supported", told);
    stranger.end();
    let stranger = start(Role::Decode, "decode-tier", &dcp);
    let told = refused_decode(fleet, &ask(31), prefill, &stranger);
    check("decode with dcp 2 and a host tier", "host tier", "start it without", told);
    stranger.end();
    let stranger = start(Role::Prefill, "prefill-tier", &dcp);
    let told = refused_prefill(fleet, &ask(32), &stranger, decode);
    check("prefill with dcp 2 and a host tier", "host tier", "start it without", told);
    stranger.end();
}
