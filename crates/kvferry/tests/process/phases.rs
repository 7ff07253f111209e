//! SIGKILL, SIGSTOP and SIGCONT of either side at every phase of a room.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use kvferry::{
    plan::Blame,
    server::{InstanceClient, Problem, Stage},
};

use crate::{
    common::wait_until,
    fleet::{
        Alone, Ask, Ended, Fleet, Flight, Peer, notice, run, settled, start_decode, start_prefill,
        wait_for_quiet, wait_for_same,
    },
};

/// How far a room is when the blow falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The victim is struck before anybody asks for the room, so that the two never pair.
    Unpaired,
    /// Decode has opened the room on a paired connection; prefill has not been asked yet.
    Open,
    /// The first chunk has landed, more are computed.
    Moving,
    /// The whole prompt is computed, every chunk is offered, not all have moved.
    Computed,
    /// Decode has the cache and generates.
    Decoding,
}

const PHASES: [Phase; 5] = [Phase::Unpaired, Phase::Open, Phase::Moving, Phase::Computed, Phase::Decoding];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    /// SIGSTOP, and SIGCONT when the other side has got over it.
    Stop,
    /// SIGKILL, and a new start.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

/// Bytes per second, so that moving lags behind computing: 512 tokens of the built-in model.
const RATE: &str = "1048576";

#[test]
fn over_tcp() {
    blows("tcp");
}

#[test]
fn over_shm() {
    blows("shm");
}

#[test]
fn over_mooncake_tcp() {
    blows("mooncake-tcp");
}

/// Where a pair has several, the link is opened before the room is bound to one.
#[test]
fn over_either_when_prefill_opens_the_link() {
    blows("tcp,shm");
}

#[test]
fn over_either_when_decode_opens_the_link() {
    blows("shm,tcp");
}

pub(crate) fn blows(transport: &str) {
    thread::scope(|scope| {
        for victim in [Side::Prefill, Side::Decode] {
            scope.spawn(move || Scene::start(transport, victim).play());
        }
    });
}

/// Two instances, one of which is struck again and again.
struct Scene {
    fleet: Fleet,
    prefill: Peer,
    decode: Peer,
    victim: Side,
    alone: Alone,
    room: u128,
}

impl Scene {
    fn start(transport: &str, victim: Side) -> Self {
        let fleet = Fleet::start();
        // Every prompt moves whole, so that each phase is met.
        let common = ["--transport", transport, "--throttle", RATE, "--chunk", "16", "--no-prefix-cache"];
        let prefill = fleet.peer("prefill", "prefill", &[&common[..], &["--layout", "tp=2"]].concat());
        let layout = ["--layout", "tp=4,dcp=2,page=8"];
        let decode = fleet.peer("decode", "decode", &[&common[..], &layout].concat());
        Self { fleet, prefill, decode, victim, alone: Alone::start(), room: 0 }
    }

    fn play(mut self) {
        self.exact("at first");
        let before = settled([&self.prefill, &self.decode]);
        for phase in PHASES {
            for blow in [Blow::Stop, Blow::Kill] {
                let what = format!("{blow:?} of {:?} at {phase:?}", self.victim);
                self.quiet(&what);
                let begun = Instant::now();
                match phase {
                    Phase::Unpaired => self.unpaired(blow, &what),
                    Phase::Open => self.open(blow, &what),
                    _ => self.under_way(phase, blow, &what),
                }
                // A sleep may have been longer than the victim's lease.
                let name = self.victim().server.instance.clone();
                wait_until(&format!("{what}: registered"), || self.fleet.members().contains(&name));
                // The first room may still meet what is left of the old connection.
                let _ = self.small();
                self.exact(&what);
                for (peer, before) in [&self.prefill, &self.decode].into_iter().zip(&before) {
                    wait_for_same(&what, peer, before);
                }
                eprintln!("{what}: {:?}", begun.elapsed());
            }
        }
    }

    fn victim(&self) -> &Peer {
        match self.victim {
            Side::Prefill => &self.prefill,
            Side::Decode => &self.decode,
        }
    }

    fn survivor(&self) -> &Peer {
        match self.victim {
            Side::Prefill => &self.decode,
            Side::Decode => &self.prefill,
        }
    }

    fn strike(&self, blow: Blow) -> Instant {
        self.victim().signal(if blow == Blow::Stop { "STOP" } else { "KILL" });
        Instant::now()
    }

    /// Lets the victim go on, or starts it again.
    fn revive(&mut self, blow: Blow) {
        match (blow, self.victim) {
            (Blow::Stop, _) => self.victim().signal("CONT"),
            (Blow::Kill, Side::Prefill) => self.prefill.restart(),
            (Blow::Kill, Side::Decode) => self.decode.restart(),
        }
    }

    fn quiet(&self, what: &str) {
        wait_for_quiet(what, &self.prefill);
        wait_for_quiet(what, &self.decode);
    }

    fn next(&mut self, tokens: u32, max_tokens: u32) -> Ask {
        self.room += 1;
        Ask::new(self.room, tokens, max_tokens)
    }

    fn small(&mut self) -> Result<(), Problem> {
        let ask = self.next(48, 6);
        let tokens = run(&self.fleet, &ask, &self.prefill, &self.decode)?;
        assert_eq!(tokens, self.alone.answer(&ask));
        Ok(())
    }

    fn exact(&mut self, what: &str) {
        self.small().unwrap_or_else(|problem| panic!("{what}: the room after it: {problem}"));
    }

    /// Waits for `done`, during which the survivor must answer.
    fn while_answering<T>(&self, what: &str, done: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let client = InstanceClient::new(&self.survivor().server.url).unwrap();
                while !over.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    runtime.block_on(client.health()).unwrap();
                    assert!(asked.elapsed() < notice(), "{what}: {:?}", asked.elapsed());
                    thread::sleep(Duration::from_millis(10));
                }
            });
            let result = done();
            over.store(true, Ordering::Relaxed);
            asking.join().unwrap();
            result
        })
    }

    /// The survivor has let go of the victim, but for what itself holds open.
    fn survivor_is_free(&self, what: &str) {
        wait_for_quiet(what, self.survivor());
        wait_until(&format!("{what}: the connection is gone"), || {
            let ledger = self.survivor().ledger();
            ["connections", "links", "accepted"].iter().all(|n| ledger.count(&format!("/node/{n}")) == 0)
        });
    }

    fn unpaired(&mut self, blow: Blow, what: &str) {
        self.strike(blow);
        self.survivor_is_free(what);
        let ask = self.next(40, 4);
        let asked = Instant::now();
        let said = tokio::sync::oneshot::channel().0;
        let prefilling = start_prefill(&self.fleet.runtime, &ask, &self.prefill);
        let decoding = start_decode(&self.fleet.runtime, &ask, &self.prefill, &self.decode, said);
        if self.victim == Side::Prefill {
            let ended = self.while_answering(what, || self.fleet.runtime.block_on(decoding).unwrap());
            let problem = failed(what, ended, asked);
            assert_eq!(problem.stage, Stage::HandOff, "{what}: {problem}");
            assert_eq!(problem.blame, Blame::PeerMisbehaved, "{what}: {problem}");
            assert!(problem.cause.contains("prefill at 127.0.0.1:"), "{what}: {problem}");
            prefilling.abort();
        } else {
            // Prefill cannot know that nobody will come: the client does, and leaves.
            wait_until(what, || self.prefill.ledger().count("/engine/finished") == 1);
            self.while_answering(what, || {
                prefilling.abort();
                wait_for_quiet(what, &self.prefill);
            });
            decoding.abort();
        }
        self.revive(blow);
        self.quiet(what);
    }

    fn open(&mut self, blow: Blow, what: &str) {
        let ask = self.next(40, 4);
        let (said, _first) = tokio::sync::oneshot::channel();
        let decoding = start_decode(&self.fleet.runtime, &ask, &self.prefill, &self.decode, said);
        wait_until(what, || self.prefill.ledger().count("/node/waiting") == 1);
        let struck = self.strike(blow);
        if self.victim == Side::Prefill {
            let ended = self.while_answering(what, || self.fleet.runtime.block_on(decoding).unwrap());
            self.lost(what, &failed(what, ended, struck));
            self.survivor_is_free(what);
            self.revive(blow);
        } else {
            self.while_answering(what, || self.survivor_is_free(what));
            assert!(struck.elapsed() < notice(), "{what}: {:?}", struck.elapsed());
            self.revive(blow);
            failed(what, self.fleet.runtime.block_on(decoding).unwrap(), Instant::now());
        }
        self.quiet(what);
    }

    fn under_way(&mut self, phase: Phase, blow: Blow, what: &str) {
        let met = (0..5).any(|_| self.met_under_way(phase, blow, what));
        assert!(met, "{what}: the room was always complete before the blow");
    }

    /// False when decode had everything from a prefill before it was struck, which on a busy machine takes longer than
    /// what is left of the transfer.
    fn met_under_way(&mut self, phase: Phase, blow: Blow, what: &str) -> bool {
        let (flight, ask, struck) = self.reach(phase, blow, what);
        let Flight { prefill, decode, .. } = flight;
        let runtime = &self.fleet.runtime;
        let complete = phase == Phase::Decoding;
        let expected = complete.then(|| self.alone.answer(&ask));
        let finished = |ended: Ended<_>| ended.0.map(|(tokens, _)| tokens);
        if self.victim == Side::Prefill {
            let ended = self.while_answering(what, || runtime.block_on(decode).unwrap());
            let late = phase == Phase::Computed && ended.0.is_ok();
            let expected = expected.or_else(|| late.then(|| self.alone.answer(&ask)));
            match expected {
                Some(expected) => assert_eq!(finished(ended), Ok(expected), "{what}"),
                None => self.lost(what, &failed(what, ended, struck)),
            }
            self.survivor_is_free(what);
            self.revive(blow);
            if late {
                // Whether it was told in time is open.
                drop(self.fleet.runtime.block_on(prefill).unwrap());
                self.quiet(what);
                return false;
            }
            if !complete {
                failed(what, self.fleet.runtime.block_on(prefill).unwrap(), Instant::now());
            }
        } else {
            let ended = self.while_answering(what, || runtime.block_on(prefill).unwrap());
            if complete {
                ended.0.unwrap_or_else(|problem| panic!("{what}: {problem}"));
            } else {
                self.lost(what, &failed(what, ended, struck));
            }
            self.while_answering(what, || self.survivor_is_free(what));
            self.revive(blow);
            let ended = self.fleet.runtime.block_on(decode).unwrap();
            match expected {
                // A process that only slept takes the request up where it was.
                Some(expected) if blow == Blow::Stop => assert_eq!(finished(ended), Ok(expected), "{what}"),
                _ => drop(failed(what, ended, Instant::now())),
            }
        }
        self.quiet(what);
        true
    }

    /// Starts a room and strikes when it has reached a phase. A room that ran past it on the way is tried again.
    fn reach(&mut self, phase: Phase, blow: Blow, what: &str) -> (Flight, Ask, Instant) {
        for _ in 0..5 {
            let ask = match phase {
                Phase::Moving => self.next(2000, 4),
                // What is left of the transfer then takes longer than it takes to notice a loss.
                Phase::Computed => self.next(1800, 4),
                _ => self.next(48, 400),
            };
            let landed = self.decode.ledger().count("/node/landed");
            let mut flight = Flight::start(&self.fleet.runtime, &ask, &self.prefill, &self.decode);
            let here = || {
                let (prefill, decode) = (self.prefill.ledger(), self.decode.ledger());
                let at = |n: &str| prefill.count(&format!("/engine/{n}"));
                match phase {
                    Phase::Moving => decode.count("/node/landed") > landed && at("prefilling") == 1,
                    Phase::Computed => {
                        at("finished") == 1 && at("prefilling") == 0 && decode.count("/node/receiving") == 1
                    }
                    _ => decode.count("/engine/decoding") == 1,
                }
            };
            if phase == Phase::Decoding {
                self.fleet.runtime.block_on(&mut flight.first).unwrap();
                wait_for_quiet(what, &self.prefill);
            }
            while !flight.decode.is_finished() {
                if here() {
                    let struck = self.strike(blow);
                    return (flight, ask, struck);
                }
            }
            let _ = flight.end(&self.fleet.runtime);
        }
        panic!("{what}: never reached");
    }

    /// The problem says that the victim was lost.
    fn lost(&self, what: &str, problem: &Problem) {
        assert_eq!(
            (problem.blame, problem.stage),
            (Blame::PeerMisbehaved, Stage::HandOff),
            "{what}: {problem}"
        );
        let lost = if self.victim == Side::Prefill { "lost prefill: " } else { "lost decode: " };
        assert!(problem.cause.contains(lost), "{what}: {problem}");
    }
}

/// A request that failed, in time.
fn failed<T: std::fmt::Debug>(what: &str, ended: Ended<T>, since: Instant) -> Problem {
    let (result, at) = ended;
    let took = at.saturating_duration_since(since);
    assert!(took < notice(), "{what}: {took:?}");
    result.expect_err(what)
}
