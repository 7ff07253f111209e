//! A peer that sleeps past the end of its room while others use what it had: what it still sends or takes when it wakes
//! reaches no page, and nobody else notices.

use std::time::Instant;

use kvferry::{plan::Blame, server::Stage};

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Fleet, Flight, Peer, notice, run, settled, wait_for_quiet, wait_for_same},
};

/// Bytes per second: 512 tokens of the built-in model.
const RATE: &str = "1048576";
/// Two of the long prompts here do not fit into it: what a room leaves is used by the next.
const POOL: &str = "2048";

#[test]
fn over_tcp() {
    asleep("tcp");
}

#[test]
fn over_shm() {
    asleep("shm");
}

#[test]
fn over_mooncake_tcp() {
    asleep("mooncake-tcp");
}

/// Prefill, then decode, sleeps in the middle of a room.
pub(crate) fn asleep(transport: &str) {
    for victim in ["prefill", "decode"] {
        Scene::start(transport, victim).play();
    }
}

/// Two instances of one side, of which one will sleep, and one of the other side, which serves both.
struct Scene {
    fleet: Fleet,
    victim: &'static str,
    sleeper: Peer,
    well: Peer,
    other: Peer,
    alone: Alone,
    rooms: u128,
}

/// One of the two.
type Which = fn(&Scene) -> &Peer;

impl Scene {
    fn start(transport: &str, victim: &'static str) -> Self {
        let fleet = Fleet::start();
        let common = ["--transport", transport, "--throttle", RATE, "--chunk", "16", "--no-prefix-cache"];
        let common = [&common[..], &["--pool-tokens", POOL]].concat();
        let peer = |role: &str, name: &str| {
            let layout = if role == "prefill" { "tp=2" } else { "tp=4,dcp=2,page=8" };
            fleet.peer(role, name, &[&common[..], &["--layout", layout]].concat())
        };
        let (sleeper, well) = (peer(victim, "sleeper"), peer(victim, "well"));
        let other = peer(if victim == "prefill" { "decode" } else { "prefill" }, "other");
        Self { fleet, victim, sleeper, well, other, alone: Alone::start(), rooms: 0 }
    }

    fn ask(&mut self, tokens: u32) -> Ask {
        self.rooms += 1;
        Ask::new(self.rooms, tokens, 4)
    }

    /// Prefill and decode of a room between `peer` and the one of the other side.
    fn pair<'a>(&'a self, peer: &'a Peer) -> (&'a Peer, &'a Peer) {
        if self.victim == "prefill" { (peer, &self.other) } else { (&self.other, peer) }
    }

    fn exact(&mut self, of: Which, what: &str) {
        let ask = self.ask(200);
        let (prefill, decode) = self.pair(of(self));
        let tokens = run(&self.fleet, &ask, prefill, decode);
        assert_eq!(tokens, Ok(self.alone.answer(&ask)), "{what}");
    }

    fn play(mut self) {
        let victim = self.victim;
        let (sleeper, well): (Which, Which) = (|s| &s.sleeper, |s| &s.well);
        self.exact(sleeper, "at first");
        self.exact(well, "at first");
        let before = settled([&self.sleeper, &self.well, &self.other]);
        for round in 0..2 {
            let what = format!("{victim}, round {round}");
            let ask = self.ask(1800);
            let (prefill, decode) = self.pair(&self.sleeper);
            let landed = decode.ledger().count("/node/landed");
            let flight = Flight::start(&self.fleet.runtime, &ask, prefill, decode);
            wait_until(&format!("{what}: it moves"), || decode.ledger().count("/node/landed") > landed + 2);
            self.sleeper.signal("STOP");
            let slept = Instant::now();
            let Flight { prefill, decode, .. } = flight;
            let told = match victim {
                "prefill" => self.fleet.runtime.block_on(decode).map(|(ended, at)| (ended.map(drop), at)),
                _ => self.fleet.runtime.block_on(prefill).map(|(ended, at)| (ended.map(drop), at)),
            };
            let (ended, at) = told.unwrap();
            assert!(at - slept < notice(), "{what}: {:?}", at - slept);
            let problem = ended.unwrap_err();
            assert_eq!((problem.blame, problem.stage), (Blame::PeerMisbehaved, Stage::HandOff), "{problem}");
            assert!(problem.cause.contains(&format!("lost {victim}: ")), "{what}: {problem}");
            wait_for_quiet(&what, &self.other);

            // Its pages, and whatever else it had, are used by others.
            for _ in 0..3 {
                self.exact(well, &what);
            }
            // And while they are, it goes on with what it was doing.
            let ask = self.ask(1800);
            let (prefill, decode) = self.pair(&self.well);
            let landed = decode.ledger().count("/node/landed");
            let flight = Flight::start(&self.fleet.runtime, &ask, prefill, decode);
            wait_until(&format!("{what}: it moves"), || decode.ledger().count("/node/landed") > landed + 2);
            self.sleeper.signal("CONT");
            assert_eq!(flight.end(&self.fleet.runtime), Ok(self.alone.answer(&ask)), "{what}");
            self.exact(well, &what);

            let name = self.sleeper.server.instance.clone();
            wait_until(&format!("{what}: registered"), || self.fleet.members().contains(&name));
            wait_for_quiet(&what, &self.sleeper);
            // The first room may still meet what is left of the old connection.
            let ask = self.ask(40);
            let (prefill, decode) = self.pair(&self.sleeper);
            let _ = run(&self.fleet, &ask, prefill, decode);
            self.exact(sleeper, &what);
            for (peer, before) in [&self.sleeper, &self.well, &self.other].into_iter().zip(&before) {
                wait_for_same(&what, peer, before);
            }
        }
    }
}
